/* A hostile process whose threads wait on sockets while somebody attaches: sockets MODE. Each waits in another call, for longer than anybody
 * lives (SO_RCVTIMEO), and nobody ever sends anything. On SIGUSR1 it says whether all of them still wait, and what it has is as it was.
 *
 *   waits   that is all
 *   turns   the descriptors of the sockets are in turn a FIFO, a terminal, a folder and nothing, without end
 *   storm   they are sent from one socket to another (SCM_RIGHTS), received and closed, without end */
#include "../programs/api.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum { WAITS = 4, AT = 300 };
static const char *mode;
static const struct timeval ages = {1000000000, 0};
static int fifo, terminal, begun, ended, own[WAITS];

static int is(const char *name) { return !strcmp(mode, name); }

static void *waits(void *which)
{
    int number = AT + (int)(intptr_t)which;
    char bytes[2][8];
    struct iovec parts[2] = {{bytes[0], 8}, {bytes[1], 8}};
    struct mmsghdr messages[2] = {{.msg_hdr = {.msg_iov = &parts[0], .msg_iovlen = 1}}, {.msg_hdr = {.msg_iov = &parts[1], .msg_iovlen = 1}}};
    __atomic_add_fetch(&begun, 1, __ATOMIC_SEQ_CST);
    switch (number - AT) {
    case 0: recv(number, bytes[0], 8, 0); break;
    case 1: accept(number, NULL, NULL); break;
    case 2: recvmmsg(number, messages, 2, 0, NULL); break;
    default: (void)!read(number, bytes[0], 8);
    }
    __atomic_add_fetch(&ended, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

static void *turn(void *unused)
{
    int folder = open(".", O_RDONLY | O_DIRECTORY);
    (void)unused;
    for (unsigned round = 0;; round++) {
        int others[] = {fifo, terminal, folder, -1};
        for (int at = 0; at < WAITS; at++) {
            if (others[round % 4] < 0) close(AT + at);
            else dup3(others[round % 4], AT + at, O_CLOEXEC);
            dup3(own[at], AT + at, O_CLOEXEC);
        }
    }
    return NULL;
}

static void *storm(void *unused)
{
    int ends[2];
    (void)unused;
    CHECK(!socketpair(AF_UNIX, SOCK_DGRAM, 0, ends));
    for (;;) {
        int sent[2 * WAITS], n = 0;
        char byte = 0, room[CMSG_SPACE(sizeof sent)];
        struct iovec bytes = {&byte, 1};
        struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        for (int at = 0; at < WAITS; at++) sent[n++] = own[at], sent[n++] = ends[at % 2];
        *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof sent), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(header), sent, sizeof sent);
        CHECK(sendmsg(ends[0], &message, 0) == 1);
        CHECK(recvmsg(ends[1], &message, MSG_CMSG_CLOEXEC) == 1 && message.msg_controllen);
        memcpy(sent, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof sent);
        for (int at = 0; at < WAITS; at++) dup3(sent[2 * at], AT + at, O_CLOEXEC);
        for (int at = 0; at < 2 * WAITS; at++) close(sent[at]);
    }
}

static int is_as_it_was(void)
{
    int in_fifo = 0, in_terminal = 0, is_well = 1;
    for (int at = 0; at < WAITS; at++) {
        struct timeval limit = {0, 0};
        socklen_t n = sizeof limit;
        is_well &= !getsockopt(own[at], SOL_SOCKET, SO_RCVTIMEO, &limit, &n) && limit.tv_sec >= 1000000;
    }
    is_well &= !ioctl(fifo, FIONREAD, &in_fifo) && in_fifo == 5 && !ioctl(terminal, FIONREAD, &in_terminal) && in_terminal == 6;
    return is_well && !__atomic_load_n(&ended, __ATOMIC_SEQ_CST);
}

int main(int argc, char **argv)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    void *context;
    pthread_t thread;
    sigset_t asked;
    int pair[2], signal, master;
    char path[64];
    CHECK(argc >= 2);
    mode = argv[1];
    sigemptyset(&asked);
    sigaddset(&asked, SIGUSR1);
    CHECK(!pthread_sigmask(SIG_BLOCK, &asked, NULL));
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    for (int at = 0; at < WAITS; at++) {
        int file;
        if (at == 1) {
            int n = snprintf(name.sun_path + 1, 60, "gputrace-sockets-%d", getpid());
            file = socket(AF_UNIX, SOCK_STREAM, 0);
            CHECK(!bind(file, (void *)&name, sizeof name.sun_family + 1 + n) && !listen(file, 1));
        } else {
            CHECK(!socketpair(AF_UNIX, at == 2 ? SOCK_DGRAM : SOCK_STREAM, 0, pair));
            file = pair[0];
        }
        CHECK(!setsockopt(file, SOL_SOCKET, SO_RCVTIMEO, &ages, sizeof ages));
        own[at] = file;
        CHECK(dup3(file, AT + at, O_CLOEXEC) == AT + at);
    }
    snprintf(path, sizeof path, "sockets.%d", getpid());
    CHECK(!mkfifo(path, 0600) && (fifo = open(path, O_RDWR)) >= 0 && write(fifo, "whole", 5) == 5);
    master = posix_openpt(O_RDWR | O_NOCTTY);
    CHECK(master >= 0 && !grantpt(master) && !unlockpt(master) && (terminal = open(ptsname(master), O_RDWR | O_NOCTTY)) >= 0);
    CHECK(write(master, "whole\n", 6) == 6);
    for (intptr_t at = 0; at < WAITS; at++) CHECK(!pthread_create(&thread, NULL, waits, (void *)at));
    while (__atomic_load_n(&begun, __ATOMIC_SEQ_CST) < WAITS) usleep(1000);
    usleep(100000);
    if (is("turns")) CHECK(!pthread_create(&thread, NULL, turn, NULL));
    if (is("storm")) CHECK(!pthread_create(&thread, NULL, storm, NULL));
    printf("ready\n");
    fflush(stdout);
    CHECK(!sigwait(&asked, &signal));
    printf(is_as_it_was() ? "as it was\n" : "changed\n");
    return 0;
}
