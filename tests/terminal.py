"""terminal.py GPUTRACE PROGRAM...: `gputrace record` as a person starts it, alone at a terminal. Says what the terminal showed.

The program says its signals itself; this says what a shell would see of gputrace's end.
"""
import os
import pty
import re
import signal
import sys

SAYS_SIGNALS = r"""
import os, signal, sys
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: say("got", signal.Signals(number).name))
leaving = []
signal.signal(signal.SIGUSR2, lambda *_: leaving.append(True))
say("ready", os.getppid())
while not leaving:
    signal.sigtimedwait([], 0.05)
say("leaves")
sys.exit(9)
"""


def start(gputrace, *command):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(gputrace, [gputrace, "record", "--", *command])
    return pid, terminal


class Screen:
    def __init__(self, terminal):
        self.terminal, self.text = terminal, ""

    def read(self):
        try:
            data = os.read(self.terminal, 4096)
        except OSError:
            return False
        self.text += data.decode().replace("\r\n", "\n")
        return bool(data)

    def until(self, pattern, n=1):
        while len(re.findall(pattern, self.text)) < n:
            assert self.read(), self.text

    def to_the_end(self):
        while self.read():
            pass
        return self.text


def end(pid):
    status = os.waitpid(pid, 0)[1]
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def main():
    gputrace, *program = sys.argv[1:]
    # What is sent to gputrace alone is handed on; what the terminal sends to both is not.
    pid, terminal = start(gputrace, sys.executable, "-u", "-c", SAYS_SIGNALS)
    screen = Screen(terminal)
    screen.until(r"ready \d+\n")
    assert screen.text.startswith(f"ready {pid}\n"), screen.text
    os.write(terminal, b"\x03")
    screen.until("got SIGINT")
    for sent in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        os.kill(pid, sent)
        screen.until("got ", screen.text.count("got ") + 1)
    os.kill(pid, signal.SIGUSR2)
    print(screen.to_the_end().replace(str(pid), "GPUTRACE"), end="")
    print(end(pid))
    # A program that is killed, and a gputrace that is.
    pid, terminal = start(gputrace, "sh", "-c", "kill -9 $$")
    Screen(terminal).to_the_end()
    print(end(pid))
    pid, terminal = start(gputrace, sys.executable, "-u", "-c", SAYS_SIGNALS)
    screen = Screen(terminal)
    screen.until(r"ready \d+\n")
    os.kill(pid, signal.SIGKILL)
    # The terminal is closed when the last process that has it ends.
    screen.to_the_end()
    print("gone with it:", end(pid))
    pid, terminal = start(gputrace, *program)
    print(Screen(terminal).to_the_end().splitlines()[-1])
    print(end(pid))


main()
