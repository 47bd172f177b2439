/* Waits in one kind of call, TURNS times for MS milliseconds, beside calls of the driver: `waits CALL MS TURNS`. Says of the turns how many
 * ended as the call ends alone, and of the others how they ended. A wait that was begun anew is too long by its own time: what this thread
 * waited for a processor does not count. */
#define _GNU_SOURCE
#include "../programs/api.h"

#include <errno.h>
#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <semaphore.h>
#include <signal.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static long ms;
static struct timespec time_of_wait;
static struct timeval small_time;
static int own_end, other_end;

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1e3 + at.tv_nsec / 1e6;
}
/* Milliseconds that this thread has waited for a processor (schedstat). */
static double delay(void)
{
    unsigned long long ran = 0, delayed = 0;
    FILE *file = fopen("/proc/thread-self/schedstat", "r");
    if (!file || fscanf(file, "%llu %llu", &ran, &delayed) != 2) delayed = 0;
    if (file) fclose(file);
    return delayed / 1e6;
}

static long receive(void) { char byte; return recv(own_end, &byte, 1, 0); }
static long read_socket(void) { char byte; return read(own_end, &byte, 1); }
static long receive_message(void)
{
    char byte;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    return recvmsg(own_end, &message, 0);
}
static long receive_messages(void)
{
    char bytes[2];
    struct iovec parts[2] = {{&bytes[0], 1}, {&bytes[1], 1}};
    struct mmsghdr messages[2] = {{.msg_hdr = {.msg_iov = &parts[0], .msg_iovlen = 1}}, {.msg_hdr = {.msg_iov = &parts[1], .msg_iovlen = 1}}};
    return recvmmsg(own_end, messages, 2, 0, NULL);
}
/* Of a ring without a request: nothing completes before the time is over. As linux/io_uring.h has it since Linux 5.11; status 77: not here. */
static long enter_ring(void)
{
    enum { FEAT_EXT_ARG = 1 << 8, ENTER_EXT_ARG = 1 << 3 };
    static int ring = -1;
    struct { uint64_t mask, n, time; } until = {.time = (uint64_t)(uintptr_t)&time_of_wait};
    if (ring < 0) {
        struct io_uring_params parameters = {0};
        ring = (int)syscall(SYS_io_uring_setup, 4, &parameters);
        if (ring < 0 || !(parameters.features & FEAT_EXT_ARG)) exit(77);
    }
    return syscall(SYS_io_uring_enter, ring, 0, 1, IORING_ENTER_GETEVENTS | ENTER_EXT_ARG, &until, sizeof until);
}
static long receive_all(void)
{
    char bytes[2];
    pid_t child = fork();
    if (child == 0) {
        CHECK(write(other_end, "a", 1) == 1);
        usleep(ms * 1000);
        CHECK(write(other_end, "b", 1) == 1);
        _exit(0);
    }
    long n = recv(own_end, bytes, 2, MSG_WAITALL);
    CHECK(waitpid(child, NULL, 0) == child);
    return n;
}
/* Writes of 1 MiB to a pipe that a child reads, with a pause after each 4 KiB or without: what is written at once, at least. */
static long write_all(int pause_us, int times)
{
    static char bytes[1 << 20];
    int ends[2];
    long least = sizeof bytes;
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        close(ends[1]);
        while (read(ends[0], bytes, pause_us ? 4096 : sizeof bytes) > 0) if (pause_us) usleep(pause_us);
        _exit(0);
    }
    close(ends[0]);
    for (int i = 0; i < times; i++) {
        long n = write(ends[1], bytes, sizeof bytes);
        if (n < least) least = n;
    }
    close(ends[1]);
    CHECK(waitpid(child, NULL, 0) == child);
    return least;
}
static long write_slowly(void) { return write_all(ms * 1000 / 256, 1); }
static long write_fast(void) { return write_all(0, 1000); }
static long accept_one(void)
{
    static int listener = -1;
    if (listener < 0) {
        struct sockaddr_un name = {.sun_family = AF_UNIX};
        int length = snprintf(name.sun_path + 1, 100, "gputrace.waits.%d", (int)getpid());
        listener = socket(AF_UNIX, SOCK_STREAM, 0);
        CHECK(bind(listener, (void *)&name, offsetof(struct sockaddr_un, sun_path) + 1 + length) == 0);
        CHECK(listen(listener, 1) == 0);
        CHECK(setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &small_time, sizeof small_time) == 0);
    }
    return accept(listener, NULL, NULL);
}
static int set_of_events(void)
{
    static int set = -1;
    if (set < 0) {
        struct epoll_event event = {.events = EPOLLIN};
        set = epoll_create1(0);
        CHECK(epoll_ctl(set, EPOLL_CTL_ADD, own_end, &event) == 0);
    }
    return set;
}
static long wait_for_events(void) { struct epoll_event event; return epoll_wait(set_of_events(), &event, 1, (int)ms); }
static long wait_as_libuv(void) { struct epoll_event event; return epoll_pwait(set_of_events(), &event, 1, (int)ms, NULL); }
static long get_events(void)
{
    static aio_context_t context;
    struct io_event event;
    if (!context) CHECK(syscall(SYS_io_setup, 8, &context) == 0);
    return syscall(SYS_io_getevents, context, 1, 1, &event, &time_of_wait);
}
static long wait_for_semaphore(void)
{
    struct sembuf down = {0, -1, 0};
    int set = semget(IPC_PRIVATE, 1, 0600);
    long answer = semtimedop(set, &down, 1, &time_of_wait);
    int error = errno;
    semctl(set, 0, IPC_RMID);
    errno = error;
    return answer;
}
static long wait_for_signal(void)
{
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    sigprocmask(SIG_BLOCK, &one, NULL);
    return sigtimedwait(&one, NULL, &time_of_wait);
}
static long poll_one(void) { struct pollfd wanted = {own_end, POLLIN, 0}; return poll(&wanted, 1, (int)ms); }
static long select_one(void)
{
    fd_set wanted;
    struct timeval time = small_time;
    FD_ZERO(&wanted);
    FD_SET(own_end, &wanted);
    return select(own_end + 1, &wanted, NULL, NULL, &time);
}
static long sleep_on(void) { return nanosleep(&time_of_wait, NULL); }
static long wait_for_word(void) { static int word; return syscall(SYS_futex, &word, FUTEX_WAIT, 0, &time_of_wait, NULL, 0); }

static const struct { const char *name; long (*call)(void); long answer; int error, needs_timeout, has_own_pace; } calls[] = {
    {"recv", receive, -1, EAGAIN, 1, 0},
    {"read", read_socket, -1, EAGAIN, 1, 0},
    {"recvmsg", receive_message, -1, EAGAIN, 1, 0},
    {"recvmmsg", receive_messages, -1, EAGAIN, 1, 0},
    {"io_uring_enter", enter_ring, -1, ETIME, 0, 0},
    {"waitall", receive_all, 2, 0, 0, 0},
    {"write_slowly", write_slowly, 1 << 20, 0, 0, 1},
    {"write_fast", write_fast, 1 << 20, 0, 0, 1},
    {"accept", accept_one, -1, EAGAIN, 0, 0},
    {"epoll_wait", wait_for_events, 0, 0, 0, 0},
    {"epoll_pwait", wait_as_libuv, 0, 0, 0, 0},
    {"io_getevents", get_events, 0, 0, 0, 0},
    {"semtimedop", wait_for_semaphore, -1, EAGAIN, 0, 0},
    {"sigtimedwait", wait_for_signal, -1, EAGAIN, 0, 0},
    {"poll", poll_one, 0, 0, 0, 0},
    {"select", select_one, 0, 0, 0, 0},
    {"nanosleep", sleep_on, 0, 0, 0, 0},
    {"futex", wait_for_word, -1, ETIMEDOUT, 0, 0},
};

int main(int argc, char **argv)
{
    int ends[2], right = 0, turns;
    size_t which = 0;
    void *context;
    CHECK(argc == 4);
    ms = atol(argv[2]);
    turns = atoi(argv[3]);
    time_of_wait = (struct timespec){ms / 1000, ms % 1000 * 1000000};
    small_time = (struct timeval){ms / 1000, ms % 1000 * 1000};
    while (which < sizeof calls / sizeof *calls && strcmp(calls[which].name, argv[1])) which++;
    CHECK(which < sizeof calls / sizeof *calls);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    own_end = ends[0];
    other_end = ends[1];
    if (calls[which].needs_timeout) CHECK(setsockopt(own_end, SOL_SOCKET, SO_RCVTIMEO, &small_time, sizeof small_time) == 0);
    puts("ready");
    fflush(stdout);
    for (int turn = 0; turn < turns; turn++) {
        CUdeviceptr at;
        OK(cuMemAlloc_v2(&at, 4096));
        OK(cuMemFree_v2(at));
        double delayed = delay(), began = now();
        errno = 0;
        long answer = calls[which].call();
        int error = answer < 0 ? errno : 0;
        double took = now() - began, without_delay = took - (delay() - delayed);
        int is_right = answer == calls[which].answer && error == calls[which].error;
        if (is_right && (calls[which].has_own_pace || (took > ms * 0.9 && without_delay < ms * 1.7))) right++;
        else printf("turn %d: %ld, error %d, %.0f ms\n", turn, answer, error, took);
    }
    printf("%d of %d\n", right, turns);
    return 0;
}
