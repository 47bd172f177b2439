/* Descriptor 2 is something: words start|later KIND [limit].
 *
 * `start` makes it so and executes itself, so that it is what the library finds when it is loaded; `later` makes it so in the running
 * program. Then it asks for memory, and says whether anything was written to descriptor 2 that the program did not write. A signal that
 * is left pending, or a mask that has changed, is a fault. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);

/* The other end of descriptor 2. */
enum { OTHER = 10 };

static int is(const char *kind, const char *name) { return strcmp(kind, name) == 0; }
static void fail(const char *what) { printf("%s: %s\n", what, strerror(errno)), exit(9); }

static void become(int end, int number)
{
    if (end < 0) fail("descriptor");
    if (end == number) return;
    if (dup2(end, number) != number) fail("dup2");
    close(end);
}

static void fill(int end)
{
    char bytes[4096];
    memset(bytes, '.', sizeof bytes);
    int flags = fcntl(end, F_GETFL);
    fcntl(end, F_SETFL, flags | O_NONBLOCK);
    while (write(end, bytes, sizeof bytes) > 0) {}
    while (write(end, bytes, 1) > 0) {}
    fcntl(end, F_SETFL, flags);
}

static void make(const char *kind)
{
    int ends[2];
    if (is(kind, "pipe") || is(kind, "gone") || is(kind, "full") || is(kind, "half")) {
        if (pipe(ends)) fail("pipe");
        char some[4096];
        if (is(kind, "full") || is(kind, "half")) fill(ends[1]);
        if (is(kind, "half") && read(ends[0], some, sizeof some) != sizeof some) fail("read");
        become(ends[1], 2);
        if (is(kind, "gone")) close(ends[0]);
        else become(ends[0], OTHER);
    } else if (is(kind, "socket") || is(kind, "gonesocket") || is(kind, "fullsocket") || is(kind, "packets")) {
        if (socketpair(AF_UNIX, is(kind, "packets") ? SOCK_DGRAM : SOCK_STREAM, 0, ends)) fail("socketpair");
        if (is(kind, "fullsocket")) fill(ends[1]);
        become(ends[1], 2);
        if (is(kind, "gonesocket")) close(ends[0]);
        else become(ends[0], OTHER);
    } else if (is(kind, "terminal") || is(kind, "stopped")) {
        int master = posix_openpt(O_RDWR | O_NOCTTY);
        if (master < 0 || grantpt(master) || unlockpt(master)) fail("terminal");
        become(open(ptsname(master), O_RDWR | O_NOCTTY), 2);
        become(master, OTHER);
        if (is(kind, "stopped") && tcflow(2, TCOOFF)) fail("tcflow");
    } else if (is(kind, "file")) {
        become(open("data", O_RDWR | O_CREAT | O_TRUNC, 0600), 2);
        if (write(2, "data", 4) != 4) fail("write");
    } else if (is(kind, "event")) {
        become(eventfd(0, EFD_NONBLOCK), 2);
    } else if (is(kind, "closed")) {
        close(2);
    } else {
        become(open(kind, O_RDWR), 2);
    }
}

/* Whether somebody else has written to descriptor 2. */
static int is_written(const char *kind)
{
    if (is(kind, "file")) return lseek(2, 0, SEEK_END) > 4;
    if (is(kind, "event")) {
        unsigned long long count;
        return read(2, &count, sizeof count) > 0;
    }
    char bytes[1 << 16];
    ssize_t n = 0;
    fcntl(OTHER, F_SETFL, O_NONBLOCK);
    if (is(kind, "stopped")) tcflow(2, TCOON);
    while ((n = read(OTHER, bytes, sizeof bytes - 1)) > 0) {
        bytes[n] = 0;
        if (memmem(bytes, (size_t)n, "gputrace: ", 10)) return 1;
    }
    return 0;
}

int main(int count, char **words)
{
    if (count < 3) return 9;
    const char *kind = words[2];
    if (is(words[1], "start") || is(words[1], "later")) make(kind);
    if (is(words[1], "start")) {
        char *again[] = {words[0], "go", words[2], words[3], NULL};
        execv("/proc/self/exe", again);
        return 9;
    }
    if (count > 3) {
        struct rlimit limit = {2 << 20, RLIM_INFINITY};
        setrlimit(RLIMIT_FSIZE, &limit);
        if (lseek(2, 2 << 20, SEEK_SET) < 0) fail("lseek");
    }
    sigset_t mask, after;
    sigprocmask(SIG_BLOCK, NULL, &mask);
    address p;
    if (cuInit(0)) return 9;
    errno = 77;
    int failed = cuMemAlloc_v2(&p, 1 << 20);
    int number = errno;
    sigprocmask(SIG_BLOCK, NULL, &after);
    sigset_t pending;
    sigpending(&pending);
    int n_pending = 0;
    for (int signal = 1; signal < 32; signal++) n_pending += sigismember(&pending, signal);
    printf("failed %d errno %d pending %d mask %s\n", failed, number, n_pending, memcmp(&mask, &after, 8) ? "changed" : "same");
    printf("written to 2: %s\n", is_written(kind) ? "yes" : "no");
    /* The driver of these tests says at its end how often it was called. */
    signal(SIGPIPE, SIG_IGN);
    return 0;
}
