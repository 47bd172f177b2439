/* Descriptor 2 is something of the program's own when the library or its recorder has something to say: `words KIND`, which is `file`,
 * `gone` (a pipe that nobody reads), `full` (one with no room), `socket` or `closed`. */
#include "torture.h"
#include <sys/socket.h>

/* Of driver.c. */
void torture_refuses(int yes);

static int is(const char *kind, const char *name) { return strcmp(kind, name) == 0; }

int main(int argc, char **argv)
{
    const char *kind = argc > 1 ? argv[1] : "file";
    int ends[2] = {-1, -1};
    char bytes[4096] = {0};
    close(2);
    if (is(kind, "file")) {
        char name[] = "/tmp/torture.XXXXXX";
        ends[0] = mkstemp(name);
        unlink(name);
    } else if (is(kind, "socket")) {
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) return 98;
    } else if (!is(kind, "closed")) {
        if (pipe(ends)) return 98;
    }
    /* The lowest number that is free was 2. */
    if (is(kind, "gone") || is(kind, "full")) {
        int reader = fcntl(ends[0], F_DUPFD, 10);
        dup2(ends[1], 2);
        if (ends[1] != 2) close(ends[1]);
        if (ends[0] != 2) close(ends[0]);
        if (is(kind, "gone")) close(reader);
        int flags = fcntl(2, F_GETFL);
        fcntl(2, F_SETFL, flags | O_NONBLOCK);
        while (is(kind, "full") && write(2, bytes, sizeof bytes) > 0) {}
        fcntl(2, F_SETFL, flags);
    }
    begin();
    long failed = work(50);
    torture_refuses(1);
    long refused = work(3);
    torture_refuses(0);
    failed += work(50);
    /* Whoever has something to say of that does so in a moment. */
    rest(200000);
    long extra = 0;
    if (is(kind, "file")) extra = lseek(2, 0, SEEK_END);
    if (is(kind, "socket")) {
        int other = ends[0] == 2 ? ends[1] : ends[0];
        extra = recv(other, bytes, sizeof bytes, MSG_DONTWAIT);
    }
    if (is(kind, "closed")) extra = fcntl(2, F_GETFD);
    printf("%s: %ld failed, refused %ld, beyond its own %ld\n", kind, failed, refused, extra);
    return failed != 0;
}
