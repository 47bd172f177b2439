"""top_terminal.py GPUTRACE TRACE: `gputrace top` at a terminal that changes its size, is stopped by Ctrl-Z and by a signal, goes on, and ends: whenever it
does not run, the terminal is as it was."""
import fcntl, os, pty, re, select, signal, struct, sys, termios

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
gputrace, trace = sys.argv[1:]
# Ours stays open: what the terminal is set to can be asked while nobody runs in it.
controller, terminal = pty.openpty()


def size(columns, rows):
    fcntl.ioctl(controller, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def attributes():
    return termios.tcgetattr(terminal)


size(60, 20)
before = attributes()
pid = os.fork()
if pid == 0:
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(terminal, number)
    os.execv(gputrace, [gputrace, "top", "--interval", "0.2", trace])
text = b""


def until(what, begin):
    """Where it begins."""
    global text
    while what not in text[begin:]:
        assert select.select([controller], [], [], 300)[0], (what, text[begin:][-400:])
        text += os.read(controller, 65536)
    return text.index(what, begin)


def picture():
    """One that begins from now on."""
    begin = until(b"\x1b[H", len(text))
    shown = text[begin : until(b"\x1b[J", begin)].decode()
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in shown.split("\r\n")]


def ended(what, options=0):
    found, status = os.waitpid(pid, options)
    assert found == pid, what
    return status


until(ENTER, 0)
assert attributes() != before, "it does not read keys as they are pressed"
wide = max(map(len, picture()))
assert 40 < wide <= 60, wide
size(120, 30)
while max(map(len, picture())) <= 60:
    pass
for how in ["Ctrl-Z", "SIGTSTP"]:
    begin = len(text)
    os.write(controller, b"\x1a") if how == "Ctrl-Z" else os.kill(pid, signal.SIGTSTP)
    assert os.WIFSTOPPED(ended(how, os.WUNTRACED)), how
    until(LEAVE, begin)
    assert attributes() == before, how
    os.kill(pid, signal.SIGCONT)
    until(ENTER, begin)
    picture()
    assert attributes() != before, how
begin = len(text)
os.write(controller, b"q")
status = ended("q")
until(LEAVE, begin)
assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, status
assert attributes() == before, "q"
print("the terminal is as it was")
