/* A hostile process that somebody else attaches to, or lists: evil MODE VICTIM. VICTIM is a file of that other user's, which this one may name
 * and not read. It calls the driver until its standard input ends. What it does when it is looked at:
 *
 *   swap     the memory file that the attacher has it make is exchanged for the victim and back, without end
 *   fifo     it is exchanged for a FIFO, which whoever opens it would wait for
 *   device   for a device
 *   sealed   for a memory file of the same name that has 1 TiB, and may not be written to
 *   early    files of the memory file's name are there before, and lead to the victim
 *   control  descriptors that are called as the control page lead to the page of a library that sleeps, and to the victim, in turn
 *   trace    its control page names a recorder, and that is a process of another user
 *   borrowed its control page names itself as the recorder, and it has the victim open without a right to read it
 *   sent     it holds whatever another process sends it
 *   moved    its control page answers as a library does, and the name of its trace leads to the victim once the recording is over */
#include "../programs/api.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <dirent.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SPARE = 400, COPIES = 20 };
static const char *mode;
static int victim;

static int high(int file)
{
    int number = fcntl(file, F_DUPFD_CLOEXEC, SPARE);
    CHECK(number >= 0);
    close(file);
    return number;
}

static int is_called(int number, const char *begin)
{
    char path[64], target[128] = {0};
    snprintf(path, sizeof path, "/proc/self/fd/%d", number);
    return readlink(path, target, sizeof target - 1) > 0 && !strncmp(target, begin, strlen(begin)) ? (strlen(target) < 120) : 0;
}

/* The descriptor that the attacher has us make. */
static int awaited(char *name)
{
    for (;;) {
        for (int number = 3; number < SPARE; number++) {
            if (!is_called(number, "/memfd:gputrace-library")) continue;
            char path[64], target[128] = {0};
            snprintf(path, sizeof path, "/proc/self/fd/%d", number);
            if (readlink(path, target, sizeof target - 1) <= 0) continue;
            target[strcspn(target, " ")] = 0;
            strcpy(name, target + strlen("/memfd:"));
            return number;
        }
    }
}

static void *exchange(void *unused)
{
    char name[128], path[64];
    int number = awaited(name), own = high(dup(number)), other = victim;
    (void)unused;
    if (!strcmp(mode, "fifo")) {
        snprintf(path, sizeof path, "fifo.%d", getpid());
        CHECK(!mkfifo(path, 0666));
        other = high(open(path, O_RDWR));
    } else if (!strcmp(mode, "device")) {
        other = high(open("/dev/zero", O_RDWR));
    } else if (!strcmp(mode, "sealed")) {
        int file = memfd_create(name, MFD_ALLOW_SEALING);
        CHECK(!ftruncate(file, 1L << 40) && !fcntl(file, F_ADD_SEALS, F_SEAL_WRITE));
        other = high(file);
    }
    for (;;) {
        dup3(other, number, O_CLOEXEC);
        if (!strcmp(mode, "swap")) dup3(own, number, O_CLOEXEC);
    }
}

/* As ring/src/control.rs lays it out. */
struct control {
    uint64_t magic;
    uint32_t version, pid, asked, state, answers, recorder;
};

static struct control *page(uint32_t recorder)
{
    struct control *control;
    int file = memfd_create("gputrace-control", 0);
    CHECK(!fchmod(file, 0600) && !ftruncate(file, 4096));
    control = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(control != MAP_FAILED);
    control->version = 2;
    control->pid = (uint32_t)getpid();
    control->state = recorder ? 3 : 1;
    control->recorder = recorder;
    memcpy(&control->magic, "gputctrl", 8);
    return control;
}

static void *turn(void *unused)
{
    int own, numbers[COPIES];
    (void)unused;
    page(0);
    for (own = 3; !is_called(own, "/memfd:gputrace-control"); own++) {}
    own = high(own);
    for (int at = 0; at < COPIES; at++) numbers[at] = dup(own);
    for (unsigned round = 0;; round++) {
        for (int at = 0; at < COPIES; at++) dup3(round % 2 ? own : victim, numbers[at], O_CLOEXEC);
    }
}

static void *receive(void *listener)
{
    char byte, room[CMSG_SPACE(sizeof(int))];
    struct iovec bytes = {&byte, 1};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    int sender = accept(*(int *)listener, NULL, NULL);
    CHECK(recvmsg(sender, &message, 0) == 1 && message.msg_controllen >= CMSG_LEN(sizeof(int)));
    CHECK(write(sender, &byte, 1) == 1);
    return NULL;
}

static void listens(void)
{
    static int listener;
    pthread_t thread;
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int n = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "gputrace-sent-%d", getpid());
    listener = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(!bind(listener, (void *)&name, sizeof name.sun_family + 1 + n) && !listen(listener, 1));
    CHECK(!pthread_create(&thread, NULL, receive, &listener));
}

static void *obey(void *victims_name)
{
    volatile struct control *control = page(0);
    int ends[2];
    CHECK(!pipe(ends));
    pid_t recorder = fork();
    if (!recorder) {
        char byte;
        close(ends[1]);
        CHECK(open("own.gtr", O_RDWR | O_CREAT | O_EXCL, 0644) >= 0);
        (void)!read(ends[0], &byte, 1);
        _exit(0);
    }
    close(ends[0]);
    while (access("own.gtr", F_OK)) usleep(1000);
    while (control->asked != 1) usleep(1000);
    control->recorder = (uint32_t)recorder;
    control->state = 3;
    control->answers++;
    while (control->asked != 2) usleep(1000);
    close(ends[1]);
    CHECK(waitpid(recorder, NULL, 0) == recorder && !unlink("own.gtr") && !symlink(victims_name, "own.gtr"));
    control->state = 1;
    control->answers++;
    return NULL;
}

int main(int argc, char **argv)
{
    void *context;
    pthread_t thread;
    struct rlimit files = {4096, 4096};
    CHECK(argc == 3);
    mode = argv[1];
    setrlimit(RLIMIT_NOFILE, &files);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    victim = high(open(argv[2], O_PATH));
    if (!strcmp(mode, "early")) {
        /* Links say what the program wants them to say: a file in memory of that name is made, and the victim put there. */
        for (int at = 0; at < COPIES; at++) {
            int file = memfd_create("gputrace-library", 0);
            if (at % 2) dup3(victim, file, 0);
        }
    } else if (!strcmp(mode, "control")) {
        CHECK(!pthread_create(&thread, NULL, turn, NULL));
    } else if (!strcmp(mode, "trace")) {
        page(1);
    } else if (!strcmp(mode, "borrowed")) {
        page((uint32_t)getpid());
    } else if (!strcmp(mode, "sent")) {
        listens();
    } else if (!strcmp(mode, "moved")) {
        CHECK(!pthread_create(&thread, NULL, obey, argv[2]));
    } else {
        CHECK(!pthread_create(&thread, NULL, exchange, NULL));
    }
    printf("ready\n");
    fflush(stdout);
    fcntl(0, F_SETFL, O_NONBLOCK);
    for (;;) {
        char byte;
        ssize_t n = read(0, &byte, 1);
        CUdeviceptr at;
        if (n == 0 || (n < 0 && errno != EAGAIN)) return 0;
        OK(cuMemAlloc_v2(&at, 4096));
        OK(cuMemFree_v2(at));
        usleep(1000);
    }
}
