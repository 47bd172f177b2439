/* A process of user 65534 whose memory lies in a file system that never answers: silent [MODE]. It maps files called as the driver and the C
 * library are, from a FUSE mount that root makes for it, as fusermount (set-user-ID) does for everybody. Whoever reads this memory waits in
 * the kernel, and cannot be killed before this process ends. Status 77: there can be no such mount here.
 *
 *   begins  it has a control page that answers as a library does that was brought in, until its recording is to end
 *   closes  only descriptors lead to that file system: those of sockets on which threads wait, and of a control page, do so in turn, and nobody
 *           else who closes a copy of one comes back from that before this process ends */
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { USER = 65534, LENGTH = 1 << 16, AT = 300, TURNS = 128 };
static int device, silent;
/* The process that closes descriptors, where another one serves: it would wait for itself when it is killed. */
static pid_t closer;

static int is_closers(uint32_t thread)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%u", closer, thread);
    return !access(path, F_OK);
}

static void answer(uint64_t unique, int error, const void *data, size_t bytes)
{
    char text[1024];
    struct fuse_out_header header = {.len = sizeof header + bytes, .error = error, .unique = unique};
    memcpy(text, &header, sizeof header);
    memcpy(text + sizeof header, data, bytes);
    if (write(device, text, header.len) < 0 && errno != ENOENT) exit(1);
}

static struct fuse_attr facts(uint64_t node)
{
    int is_root = node == 1;
    struct fuse_attr facts = {.ino = node, .nlink = 1, .blksize = 4096};
    facts.mode = is_root ? S_IFDIR | 0755 : S_IFREG | 0755;
    facts.size = is_root ? 0 : LENGTH;
    return facts;
}

static void *serve(void *unused)
{
    static char asked[1 << 17];
    (void)unused;
    for (;;) {
        struct fuse_in_header *header = (void *)asked;
        const char *name = asked + sizeof *header;
        ssize_t n = read(device, asked, sizeof asked);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return NULL;
        switch (header->opcode) {
        case FUSE_INIT: {
            struct fuse_init_out begin = {.major = 7, .minor = 31, .max_readahead = 4096, .max_write = 4096};
            answer(header->unique, 0, &begin, sizeof begin);
            break;
        }
        case FUSE_LOOKUP: {
            uint64_t node = !strcmp(name, "libcuda.so.1") ? 2 : !strcmp(name, "libc.so.6") ? 3 : 0;
            struct fuse_entry_out entry = {.nodeid = node, .attr_valid = 1000, .entry_valid = 1000};
            entry.attr = facts(node);
            answer(header->unique, node ? 0 : -ENOENT, &entry, node ? sizeof entry : 0);
            break;
        }
        case FUSE_GETATTR: {
            struct fuse_attr_out found = {.attr_valid = 1000, .attr = facts(header->nodeid)};
            answer(header->unique, 0, &found, sizeof found);
            break;
        }
        case FUSE_OPEN: {
            struct fuse_open_out opened = {0};
            answer(header->unique, 0, &opened, sizeof opened);
            break;
        }
        case FUSE_FLUSH:
            if (!closer) answer(header->unique, -ENOSYS, "", 0);
            else if (is_closers(header->pid)) answer(header->unique, 0, "", 0);
            break;
        case FUSE_READ:
        case FUSE_INTERRUPT:
        case FUSE_FORGET:
        case FUSE_BATCH_FORGET:
            break;
        default:
            answer(header->unique, -ENOSYS, "", 0);
        }
    }
}

/* As ring/src/control.rs lays it out. */
struct control {
    uint64_t magic;
    uint32_t version, pid, asked, state, answers, recorder;
    uint64_t known, unknown;
    uint32_t is_late, words;
};

static void *begin(void *unused)
{
    int file = memfd_create("gputrace-control", 0);
    volatile struct control *control;
    (void)unused;
    if (file < 0 || fchmod(file, 0600) || ftruncate(file, 4096)) exit(1);
    control = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (control == MAP_FAILED || open("silent.gtr", O_RDWR | O_CREAT, 0644) < 0) exit(1);
    *control = (struct control){.version = 2, .pid = (uint32_t)getpid(), .state = 1, .is_late = 1, .words = 1};
    memcpy((void *)&control->magic, "gputctrl", 8);
    while (control->asked != 1) usleep(1000);
    control->recorder = (uint32_t)getpid();
    control->state = 3;
    control->answers++;
    return NULL;
}

/* A page, and sockets, that are a file of the mount every other moment. */
static void *turn(void *unused)
{
    int page = memfd_create("gputrace-control", 0), pair[2];
    (void)unused;
    if (page < 0 || fchmod(page, 0600) || ftruncate(page, 4096) || socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) exit(1);
    for (;;) {
        for (int at = 0; at < TURNS; at++) dup3(at ? page : pair[0], AT + at, O_CLOEXEC);
        for (int at = 0; at < TURNS; at++) dup3(silent, AT + at, O_CLOEXEC);
    }
    return NULL;
}

static void *waits(void *unused)
{
    char byte;
    while (recv(AT, &byte, 1, 0) < 0) {}
    return unused;
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"libcuda.so.1", "libc.so.6"};
    char folder[] = "/tmp/gputrace-silent.XXXXXX", options[128];
    pthread_t thread;
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (device < 0 || !mkdtemp(folder)) return 77;
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=%d,group_id=%d", device, USER, USER);
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)
        || mount("silent", folder, "fuse", MS_NOSUID | MS_NODEV, options)) {
        rmdir(folder);
        return 77;
    }
    if (setgid(USER) || setuid(USER) || prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)) return 1;
    int closes = argc > 1 && !strcmp(argv[1], "closes");
    if (closes) {
        pid_t own = getpid();
        if (fork() == 0) {
            closer = own;
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            serve(NULL);
            _exit(0);
        }
        close(device);
    } else if (pthread_create(&thread, NULL, serve, NULL)) {
        return 1;
    }
    for (int at = 0; at < 2; at++) {
        char path[128];
        void *place = (void *)(0x10000000L + at * 0x1000000L);
        snprintf(path, sizeof path, "%s/%s", folder, names[at]);
        int file = open(path, O_RDONLY);
        if (closes && file >= 0) {
            /* Its memory answers: the driver is a file of this folder, and the C library its own. */
            silent = file;
            file = open(names[0], O_RDONLY);
            if (at) break;
        }
        if (file < 0 || mmap(place, LENGTH, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, file, 0) != place) return 1;
        /* While there is somebody to answer it. */
        close(file);
    }
    if (closes && (pthread_create(&thread, NULL, turn, NULL) || pthread_create(&thread, NULL, waits, NULL))) return 1;
    if (argc > 1 && !closes && pthread_create(&thread, NULL, begin, NULL)) return 1;
    /* Only here it is mounted: outside it is an empty folder, which whoever started us removes. */
    printf("%s\n", folder);
    fflush(stdout);
    getchar();
    _exit(0);
}
