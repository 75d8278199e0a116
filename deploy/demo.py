#!/usr/bin/env python3
"""A federation between three sites on this machine, as it happens: TLS, registered keys, and a site that fails.

Five rounds of Self-FL on handwritten digits; in the sixth a site's node is killed; in the seventh it is back, with its
memory.  Nothing leaves the machine.  Run by ``make flower-demo``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from local_federation import HERE, DeploymentError, LocalFederation, Run
from rich.console import Console
from rich.table import Table

CLIENTS = range(3)
VICTIM = 2
ROUND_SECONDS = 30.0  # of a round in which a node is gone; more than a node needs to say who it is
COLUMNS = {
    "round": "round",
    "clients": "sites",
    "seconds": "seconds",
    "inter_variance": "inter-variance",
    "weighted_accuracy": "personal accuracy",
    "global_accuracy": "global accuracy",
}


class Demo:
    """The demonstration, and the clock that its lines carry."""

    def __init__(self, folder: Path) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()
        self.federation = LocalFederation(
            folder,
            HERE.parent / "examples" / "flower",
            CLIENTS,
            say=self.say,
            environment={"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"},
        )

    def say(self, line: str, style: str = "") -> None:
        """One line, with the seconds since the beginning."""
        self._console.print(f"[dim]{time.monotonic() - self._began:5.0f} s[/dim]  {line}", style=style)

    def headline(self, text: str) -> None:
        """What comes next."""
        self._console.print(f"\n[bold]{text}[/bold]")

    def run(self) -> Run:
        """All of it; the last run."""
        with self.federation:
            self.headline("A server and three sites")
            self.federation.start()
            self.say("all three nodes are let in")

            self.headline("Five rounds of Self-FL")
            run = self.federation.submit(rounds=5)
            self.follow(run, range(1, 6))
            self.federation.wait_for_end(run)
            before = self.remembered()

            self.headline(f"Round 6: site {VICTIM} fails while it computes")
            since = {name: self.federation.position(name) for name in (VICTIM, "superlink")}
            run = self.federation.submit(rounds=6, round_seconds=ROUND_SECONDS)
            self.federation.wait_for_log(VICTIM, "Receiving: train message", since[VICTIM])
            since[VICTIM] = self.federation.position(VICTIM)
            self.federation.kill_node(VICTIM)
            self.say(f"the round waits {ROUND_SECONDS:g} s for the answer, and closes with those that came")
            self.follow(run, [6])
            self.say("the server's log:")
            for line in self.federation.run_log(run).splitlines():
                if "left out" in line or "no answer" in line:
                    self.say(f"    {line.strip()}", style="yellow")

            self.headline(f"Site {VICTIM} comes back")
            self.say("its supervisor starts it again and again: the server refuses the key while it takes the old")
            self.say("node for alive, which is for a minute after its last sign of life")
            self.federation.wait_for_node(VICTIM, since[VICTIM], 180.0)
            refused = self.federation.read_log(VICTIM, since[VICTIM]).count("started again in")
            self.say(f"let in, at start number {refused + 1}")
            self.federation.wait_for_end(run)
            kept = self.remembered()
            if kept[VICTIM] < before[VICTIM]:
                raise DeploymentError(f"site {VICTIM} remembers round {kept[VICTIM]}; expected {before[VICTIM]}.")

            self.headline("Round 7: all three again")
            run = self.federation.submit(rounds=7)
            self.follow(run, [7])
            self.federation.wait_for_end(run)
            self.remembered()
            self.headline("Everything is ended")
        return run

    def follow(self, run: Run, rounds: Sequence[int]) -> None:
        """Say when each round is over."""
        for number in rounds:
            row = self.federation.wait_for_round(run, number)
            self.say(f"round {number} is over: {row['clients']} of {len(CLIENTS)} sites", style="green")

    def remembered(self) -> dict[int, int]:
        """Which round each site's memory is of."""
        found = {client: max(self.federation.rounds_remembered(client).values(), default=0) for client in CLIENTS}
        self.say("on the sites' disks: " + ", ".join(f"site {c} remembers round {r}" for c, r in found.items()))
        return found

    def report(self, run: Run) -> None:
        """The history as a table, and where everything lies."""
        table = Table(box=None, header_style="bold", pad_edge=False)
        for title in COLUMNS.values():
            table.add_column(title, justify="right")
        for row in self.federation.history(run.out):
            table.add_row(*(_short(row.get(name, "")) for name in COLUMNS))
        self._console.print(table)
        page = self.federation.folder / "report.html"
        subprocess.run([Path(sys.executable).with_name("selffl"), "report", run.out, "--out", page], check=True)
        self._console.print(f"\nrecords   {run.out}")
        memories = self.federation.folder / "memory"
        self._console.print(f"memories  {memories}   (selffl flower list {memories / 'site-0'})")
        self._console.print(f"logs      {self.federation.folder / 'logs'}")


def _short(text: str) -> str:
    try:
        return text if text.isdigit() else f"{float(text):.4g}"
    except ValueError:
        return text or "–"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="demo.py", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path("runs/flower-demo"), help="folder for all of it (%(default)s)")
    found = parser.parse_args(arguments)
    mark = found.out / "demo"
    if found.out.exists():
        if not mark.is_file():
            parser.error(
                f"{found.out} is there and not of an earlier demonstration; expected none. Give another --out."
            )
        shutil.rmtree(found.out)
    found.out.mkdir(parents=True)
    mark.touch()
    try:
        demo = Demo(found.out)
        demo.report(demo.run())
    except DeploymentError as error:
        print(f"demo.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo.py: stopped; everything is ended.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
