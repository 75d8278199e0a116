"""What `test_deploy_failures.py` looks at: a federation over TLS, what it refuses, and two of its processes killed.

Run in namespaces of its own, as ``python scenario.py FOLDER``; what it finds goes to ``FOLDER/found.json``.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "deploy"))

from local_federation import LocalFederation  # noqa: E402

SETTINGS = {"participation": 1.0, "learning_rate": 0.05, "batch_size": 5, "seed": 3, "evaluate_every": 0}
METHOD, OTHERS = "self-fl-exact", ("self-fl", "ditto", "fedavg")
PATIENCE_SECONDS = 200  # of a round that ends when all have answered, or are known to be gone: a machine may be busy
WHOLE = 4  # rounds in which all answer, though the server dies in one of them; in the last of them variances are known
VICTIM = 2


class Scenario:
    def __init__(self, folder: Path) -> None:
        self.began = time.monotonic()
        paths = [str(HERE / "hastened"), os.environ.get("PYTHONPATH", str(ROOT / "src"))]
        self.pause = folder / "pause"  # while it is there no client trains
        hastened = {
            "PYTHONPATH": os.pathsep.join(paths),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            "HASTENED_PAUSE": str(self.pause),
        }
        self.federation = LocalFederation(
            folder, ROOT / "examples" / "flower", range(3), environment=hastened, say=self.say
        )
        self.found: dict[str, object] = {}

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} {line}", flush=True)

    def run(self) -> None:
        with self.federation as federation:
            try:
                federation.start()
                self.refusals()
                self.server_dies()
                self.node_dies()
                self.other_methods()
            finally:
                self.found["seconds"] = time.monotonic() - self.began
                text = json.dumps(self.found, indent=1)
                (federation.folder / "found.json").write_text(text, encoding="utf-8")

    # ------------------------------------------------------------------------------------------------------ refusals

    def refusals(self) -> None:
        federation = self.federation
        folder = federation.folder
        federation.script("make-ca", str(folder / "other-ca"))
        federation.script("make-node-key", str(folder / "keys"), "stranger")
        stranger = {"key": str(folder / "keys" / "stranger"), "client": "0", "memory": str(folder / "stranger")}
        plain = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{federation.port + 1}", "--port", "9399"]
        attempts = {
            # name: command, and whether it gives up
            "unregistered": (federation.node_command("stranger", **stranger, port="9301"), True),
            "wrong-ca": (federation.node_command(0, ca=str(folder / "other-ca" / "ca.crt"), port="9302"), True),
            "plain": (plain, False),
        }
        since = {name: federation.position(name) for name in ("superlink", "gate")}
        for name, (command, gives_up) in attempts.items():
            self.found[name] = self.attempt(name, command, gives_up)
        # What an operator does, through the door that is for the sites.
        own = {"FLWR_HOME": str(folder / "cli-at-the-gate")}
        address, ca = f"127.0.0.1:{federation.port + 1}", str(federation.certificates / "ca.crt")
        for words in (
            [str(ROOT / "deploy" / "connect"), "gate", address, ca],
            ["flwr", "supernode", "register", f"{folder / 'keys' / 'stranger'}.pub", "gate"],
            ["flwr", "run", str(federation.app), "gate"],
        ):
            done = subprocess.run(
                words, env=federation._environment | own, cwd=folder, capture_output=True, text=True, check=False
            )
            self.found[f"gate: {words[1]}"] = [done.returncode, done.stdout + done.stderr]
        self.found["refusals"] = {name: federation.read_log(name, place) for name, place in since.items()}
        self.found["nodes after refusals"] = federation.script("nodes", "list", "--connection", "local")

    def attempt(self, name: str, command: list[str], gives_up: bool) -> list[object]:
        """Start a node that should not be let in: its exit status, if it ended, and what it said."""
        self.say(f"attempt: {name}")
        path = self.federation.folder / "logs" / f"{name}.log"
        environment = self.federation._environment | {"FLWR_LOG_LEVEL": "DEBUG"}
        with path.open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=self.federation.folder
            )
        end = time.monotonic() + 30
        while time.monotonic() < end and process.poll() is None:
            if not gives_up and "Connection attempt failed" in path.read_text(errors="replace"):
                break
            time.sleep(0.2)
        status = process.poll()
        process.kill()
        process.wait()
        return [status, path.read_text(errors="replace")]

    # ------------------------------------------------------------------------------------------------- the server dies

    def server_dies(self) -> None:
        federation = self.federation
        run = federation.submit(algorithm=METHOD, rounds=WHOLE, round_seconds=PATIENCE_SECONDS, **SETTINGS)
        federation.wait_for_round(run, 1)
        self.pause.touch()
        since = federation.position(0)
        federation.wait_for_log(0, "Receiving: train message", since)
        self.found["remembered when the server dies"] = self.remembered()
        since = federation.position("superlink")
        federation.kill_superlink()
        self.pause.unlink()
        self.found["rounds when the server dies"] = [int(row["round"]) for row in federation.history(run.out)]
        federation.wait_for_superlink(since)
        self.say("the SuperLink is back")
        run = federation.resume(run.out)
        federation.wait_for_round(run, WHOLE)
        federation.wait_for_end(run)
        self.found["out"] = str(run.out)
        shutil.copytree(run.out, federation.folder / "whole")
        shutil.copytree(federation.folder / "memory", federation.folder / "whole-memory")
        self.say("all rounds with all clients are done")

    def remembered(self) -> dict[int, int]:
        return {c: max(self.federation.rounds_remembered(c).values(), default=0) for c in range(3)}

    # --------------------------------------------------------------------------------------------------- a node dies

    def node_dies(self) -> None:
        federation = self.federation
        before = self.memories(VICTIM)
        since = federation.position(VICTIM)
        self.pause.touch()
        run = federation.submit(algorithm=METHOD, rounds=WHOLE + 1, round_seconds=PATIENCE_SECONDS, **SETTINGS)
        federation.wait_for_log(VICTIM, "Receiving: train message", since)
        since = federation.position(VICTIM)
        federation.kill_node(VICTIM)
        self.pause.unlink()
        self.found["round without"] = federation.wait_for_round(run, WHOLE + 1)
        self.say("the round is closed")
        federation.wait_for_node(VICTIM, since)
        self.say("the node is back")
        federation.wait_for_end(run)
        self.found["log"] = federation.run_log(run)
        self.found["restarts"] = re.findall(r"supervise: .*", federation.read_log(VICTIM, since))
        self.found["is intact"] = self.memories(VICTIM) == before
        self.found["remembered without"] = self.remembered()
        run = federation.submit(algorithm=METHOD, rounds=WHOLE + 2, round_seconds=PATIENCE_SECONDS, **SETTINGS)
        self.found["round with"] = federation.wait_for_round(run, WHOLE + 2)
        federation.wait_for_end(run)
        self.found["remembered with"] = self.remembered()

    # -------------------------------------------------------------------------------------------------- other methods

    def other_methods(self) -> None:
        """Side by side: a server has several runs at once, and a site several memories."""
        federation = self.federation
        runs = {
            name: federation.submit(
                out=f"runs/{name}", algorithm=name, rounds=2, round_seconds=PATIENCE_SECONDS, **SETTINGS
            )
            for name in OTHERS
        }
        for run in runs.values():
            federation.wait_for_round(run, 2)
            federation.wait_for_end(run)
        self.found["others"] = {name: str(run.out) for name, run in runs.items()}

    def memories(self, client: int) -> dict[str, str]:
        """What a client's disk holds, byte by byte."""
        folder = self.federation.memory(client)
        return {str(path): path.read_bytes().hex() for path in sorted(folder.glob("*/*.safetensors"))}


if __name__ == "__main__":
    Scenario(Path(sys.argv[1])).run()
