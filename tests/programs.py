"""Processes that need not import everything again: forked from the test's own, which has torch already."""

import os
import runpy
import signal
import sys
import traceback

import torch

from selffl import cli


def fork(function, *arguments):
    """Call a function in a process of its own: its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)  # those of the other process are not there
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def become_selffl(words, folder=".", environment=None):
    """Be `selffl WORDS...` from here on, with the files 0, 1 and 2 as input, output and messages."""
    code = 1
    try:
        os.chdir(folder)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        torch.set_num_threads(1)
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: SIM115
        cli.console.out, cli.console.err = cli.console._Console(), cli.console._Console(stderr=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["selffl", *words]
        cli.main()
    except SystemExit as stopped:
        code = stopped.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


_ends = set()  # of pipes to all scripts, which are this process's alone


class Script:
    """A script of Python's, forked: what `subprocess.Popen` gives of one that is written to and read from."""

    def __init__(self, command, *, stdin=None, stdout=None, text=True, env=os.environ, stderr=None):
        words = list(command[command.index(sys.executable) + 1 :])
        (reading, to), (of, writing) = os.pipe(), os.pipe()
        self.stdin, self.stdout, self.returncode = open(to, "w"), open(of), None  # noqa: SIM115
        _ends.update((self.stdin, self.stdout))
        errors = [] if stderr is None else [stderr.fileno()]
        self.pid = fork(self._run, words, env, [reading, writing, *errors])
        os.close(reading)
        os.close(writing)

    def _run(self, words, environment, files):
        for end in _ends:
            if not end.closed:
                os.close(end.fileno())
        for number, file in enumerate(files):
            os.dup2(file, number)
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = words
        sys.path.insert(0, os.path.dirname(words[0]))
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as stopped:
            if stopped.code:
                raise
        sys.stdout.flush()

    def wait(self):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self):
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self):
        self.stdin.close()
        self.stdout.close()
        self.wait()
