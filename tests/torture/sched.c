/* What a program asked of the scheduler for itself is not for its recorder: a thread that is pinned, or has a real-time policy, makes the
 * first call; the recorder must have the processors that the process had, and an ordinary policy. Says only what is not so. */
#include "torture.h"
#include <dirent.h>
#include <sched.h>

static int recorder(void)
{
    char path[300], line[512], mine[4200];
    static char environment[1 << 17];
    int found = 0;
    snprintf(mine, sizeof mine, "TORTURE_USAGE=%s", getenv("TORTURE_USAGE"));
    DIR *processes = opendir("/proc");
    for (struct dirent *entry; processes && !found && (entry = readdir(processes));) {
        int pid = atoi(entry->d_name);
        if (pid <= 0 || pid == getpid()) continue;
        snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
        int file = open(path, O_RDONLY);
        ssize_t n = file < 0 ? -1 : read(file, line, sizeof line - 1);
        if (file >= 0) close(file);
        if (n <= 0) continue;
        line[n] = 0;
        const char *verb = line + strlen(line) + 1;
        if (verb >= line + n || strcmp(verb, "recorder")) continue;
        snprintf(path, sizeof path, "/proc/%d/environ", pid);
        file = open(path, O_RDONLY);
        n = file < 0 ? -1 : read(file, environment, sizeof environment);
        if (file >= 0) close(file);
        if (n > 0 && memmem(environment, (size_t)n, mine, strlen(mine))) found = pid;
    }
    closedir(processes);
    return found;
}

int main(int argc, char **argv)
{
    cpu_set_t had, one, its;
    (void)argc, (void)argv;
    sched_getaffinity(0, sizeof had, &had);
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &had)) {
            CPU_SET(cpu, &one);
            break;
        }
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    struct sched_param parameter = {.sched_priority = 5};
    if (sched_setscheduler(0, SCHED_FIFO, &parameter)) fprintf(stderr, "no rights to a real-time policy\n");
    begin();
    work(10);
    struct sched_param ordinary = {.sched_priority = 0};
    sched_setscheduler(0, SCHED_OTHER, &ordinary);
    sched_setaffinity(0, sizeof had, &had);
    rest(200000);
    int pid = recorder();
    if (pid) {
        CHECK(sched_getscheduler(pid) == SCHED_OTHER);
        CHECK(sched_getaffinity(pid, sizeof its, &its) == 0 && CPU_EQUAL(&its, &had));
    }
    sched_getaffinity(0, sizeof its, &its);
    CHECK(CPU_EQUAL(&its, &had));
    printf("%ld failed\n", work(10));
    return 0;
}
