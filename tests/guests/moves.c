/* A program that goes into a mount namespace of its own when its recorder has started outside, and asks for memory in a
 * library that only that namespace has. Arguments: a folder, in which a tmpfs takes the place of what is there; the
 * library's file; and `kill`, if it is to end so. Exit code 77 where it may not. */
#define _GNU_SOURCE
#include "../programs/api.h"

#ifdef WEIGHTS
__attribute__((noinline)) void load_inside(void)
{
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, WEIGHTS));
    CHECK(p);
}
#else

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <unistd.h>

static char library[1 << 20];

static void put(const char *path, const void *data, size_t bytes)
{
    int file = open(path, O_CREAT | O_WRONLY, 0755);
    CHECK(write(file, data, bytes) == (ssize_t)bytes);
    OK(close(file));
}

static void leave(void)
{
    char users[64], groups[64];
    int n_users = snprintf(users, sizeof users, "0 %u 1", (unsigned)getuid());
    int n_groups = snprintf(groups, sizeof groups, "0 %u 1", (unsigned)getgid());
    if (unshare(CLONE_NEWNS) == 0) return;
    /* Whoever is not root can only have a namespace together with one of users. */
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) exit(77);
    put("/proc/self/uid_map", users, n_users);
    put("/proc/self/setgroups", "deny", 4);
    put("/proc/self/gid_map", groups, n_groups);
}

int main(int argc, char **argv)
{
    void *context;
    char path[4096];
    CHECK(argc > 2);
    int file = open(argv[2], O_RDONLY);
    ssize_t bytes = read(file, library, sizeof library);
    CHECK(bytes > 0 && bytes < (ssize_t)sizeof library);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    leave();
    OK(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL));
    OK(mount("none", argv[1], "tmpfs", 0, NULL));
    snprintf(path, sizeof path, "%s/libinside.so", argv[1]);
    put(path, library, bytes);
    void *handle = dlopen(path, RTLD_NOW);
    CHECK(handle);
    ((void (*)(void))dlsym(handle, "load_inside"))();
    if (argc > 3) {
        /* Killed by the test, when the recorder has looked at the process. */
        alarm(1800);
        pause();
    }
    return 0;
}
#endif
