/* A machine without room for the ring: fails what the variable NO_ROOM lists (shm, memfd, tmp) as the system would. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

static int lacks(const char *what)
{
    const char *list = getenv("NO_ROOM");
    return list && strstr(list, what) != NULL;
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    int is_ring = (flags & O_CREAT) && strstr(path, "/gputrace.") != NULL;
    if (is_ring && strncmp(path, "/dev/shm/", 9) == 0 && lacks("shm")) { errno = ENOSPC; return -1; }
    if (is_ring && strncmp(path, "/tmp/", 5) == 0 && lacks("tmp")) { errno = EACCES; return -1; }
    static int (*next)(const char *, int, ...);
    if (!next) next = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    return next(path, flags, mode);
}

long syscall(long number, ...)
{
    va_list rest;
    va_start(rest, number);
    long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long), d = va_arg(rest, long);
    long e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_memfd_create && lacks("memfd")) { errno = ENOSYS; return -1; }
    static long (*next)(long, ...);
    if (!next) next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return next(number, a, b, c, d, e, f);
}
