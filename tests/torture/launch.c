/* Makes the surroundings that a scenario asks for, runs the program in them and ends as it ends.
 *
 *     launch [WORD ...] -- PROGRAM [ARGUMENT ...]
 *
 * The words are in the table at the end of this file. The library is preloaded into the program only: TORTURE_PRELOAD becomes its
 * LD_PRELOAD. The program's processor time goes to the file TORTURE_USAGE. What cannot be made here (for want of rights) ends with 125 and
 * a line `launch: skip: why`. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void skip(const char *what)
{
    fprintf(stderr, "launch: skip: %s: %s\n", what, strerror(errno));
    exit(125);
}
static void need(int is_done, const char *what)
{
    if (!is_done) skip(what);
}

/* Namespaces must be entered before the program's process is made, the rest belongs to that process. */
static int namespaces, is_in_own_proc;
static int kill_after_us = -1, hurt_after_us = -1, hurt_signal;

static void private_mounts(void)
{
    static int done;
    if (done++) return;
    need(unshare(CLONE_NEWNS) == 0, "a mount namespace");
    need(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0, "private mounts");
}

/* tmpfs:PATH:SIZE */
static void word_tmpfs(char *text)
{
    char *path = strsep(&text, ":"), options[64];
    snprintf(options, sizeof options, "size=%s,mode=1777", text);
    private_mounts();
    need(mount("tmpfs", path, "tmpfs", 0, options) == 0, path);
}
/* readonly:PATH: a file system into which nothing can be put. */
static void word_readonly(char *path)
{
    private_mounts();
    need(mount("tmpfs", path, "tmpfs", MS_RDONLY, "size=4k") == 0, path);
}
/* no-shm: a machine without /dev/shm. */
static void word_no_shm(char *unused)
{
    const char *devices[] = {"/dev/null", "/dev/zero", "/dev/urandom", "/dev/tty", NULL};
    char kept[64];
    (void)unused;
    private_mounts();
    need(mount("tmpfs", "/mnt", "tmpfs", 0, "size=64k,mode=755") == 0, "/mnt");
    for (const char **device = devices; *device; device++) {
        snprintf(kept, sizeof kept, "/mnt%s", *device + 4);
        int file = open(kept, O_CREAT | O_WRONLY, 0666);
        need(file >= 0, kept);
        close(file);
        need(mount(*device, kept, NULL, MS_BIND, NULL) == 0, *device);
    }
    need(mount("/mnt", "/dev", NULL, MS_MOVE, NULL) == 0, "/dev");
}
/* pid: the program is PID 1 of a namespace. */
static void word_pid(char *unused)
{
    (void)unused;
    need(unshare(CLONE_NEWPID) == 0, "a PID namespace");
    namespaces |= CLONE_NEWPID;
}
/* hidepid: with `pid`, a /proc in which others' processes are not seen. no-proc: none at all. */
static const char *proc_options;
static void word_hidepid(char *unused)
{
    (void)unused;
    private_mounts();
    proc_options = "hidepid=2";
    is_in_own_proc = 1;
}
static void word_proc(char *unused)
{
    word_hidepid(unused);
    proc_options = NULL;
}
static void word_no_proc(char *unused)
{
    (void)unused;
    private_mounts();
    need(mount("tmpfs", "/proc", "tmpfs", MS_RDONLY, "size=4k") == 0, "/proc");
}

/* In the program's process. */
static int has_limit[RLIM_NLIMITS];
static rlim_t limits[RLIM_NLIMITS];
static void word_limit(char *text)
{
    static const struct { const char *name; int which; } names[] = {
        {"fsize", RLIMIT_FSIZE}, {"as", RLIMIT_AS}, {"nofile", RLIMIT_NOFILE}, {"nproc", RLIMIT_NPROC},
        {"memlock", RLIMIT_MEMLOCK}, {"stack", RLIMIT_STACK}, {"cpu", RLIMIT_CPU},
    };
    char *name = strsep(&text, ":");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i].name, name) == 0) has_limit[names[i].which] = 1, limits[names[i].which] = strtoul(text, NULL, 0);
}
static int becomes_nobody, is_undumpable, is_subreaper, has_closed_streams, is_fifo, pinned_to = -1, is_folder_gone;
static void word_nobody(char *unused) { (void)unused, becomes_nobody = 1; }
static void word_undumpable(char *unused) { (void)unused, is_undumpable = 1; }
static void word_subreaper(char *unused) { (void)unused, is_subreaper = 1; }
static void word_closed(char *unused) { (void)unused, has_closed_streams = 1; }
static void word_fifo(char *unused) { (void)unused, is_fifo = 1; }
static void word_pin(char *cpu) { pinned_to = atoi(cpu); }
static void word_folder_gone(char *unused) { (void)unused, is_folder_gone = 1; }

/* first=LIBRARY, last=LIBRARY: preloaded before or behind ours; by its path, or by its name where systems have libraries. */
static const char *first_preload, *last_preload;
static const char *library(const char *name)
{
    static const char *const folders[] = {"", "/usr/lib/x86_64-linux-gnu/", "/usr/lib/aarch64-linux-gnu/", "/usr/lib64/", "/usr/lib/"};
    for (size_t i = strchr(name, '/') ? 0 : 1; i < sizeof folders / sizeof *folders; i++) {
        char *path = malloc(strlen(folders[i]) + strlen(name) + 1);
        strcat(strcpy(path, folders[i]), name);
        if (access(path, R_OK) == 0) return path;
        free(path);
    }
    skip(name);
    return NULL;
}
static void word_first(char *path) { first_preload = library(path); }
static void word_last(char *path) { last_preload = library(path); }

/* errno:NAME,NAME or kill:NAME,NAME: a filter of system calls, as containers and sandboxes have. */
static const struct { const char *name; int number; } calls[] = {
    {"memfd_create", SYS_memfd_create}, {"close_range", 436}, {"process_vm_readv", SYS_process_vm_readv}, {"ptrace", SYS_ptrace},
    {"pidfd_open", 434}, {"membarrier", SYS_membarrier}, {"fallocate", SYS_fallocate}, {"clone3", 435}, {"statx", SYS_statx},
    {"sched_setscheduler", SYS_sched_setscheduler}, {"sched_setaffinity", SYS_sched_setaffinity}, {"setsid", SYS_setsid},
    {"mlock", SYS_mlock}, {"munlock", SYS_munlock}, {"prlimit64", SYS_prlimit64}, {"getdents64", SYS_getdents64},
    {"process_madvise", 440}, {"pidfd_getfd", 438}, {"flock", SYS_flock},
};
static struct sock_filter filter[128];
static unsigned short filter_length;
static void filter_out(char *names, unsigned action)
{
    struct sock_filter begin[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    };
    filter[filter_length++] = begin[0];
    for (char *name; (name = strsep(&names, ","));) {
        int number = -1;
        for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
            if (strcmp(calls[i].name, name) == 0) number = calls[i].number;
        if (number < 0) errno = EINVAL, skip(name);
        filter[filter_length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)number, 0, 1);
        filter[filter_length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action);
    }
    filter[filter_length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
}
static void word_errno(char *names) { filter_out(names, SECCOMP_RET_ERRNO | EPERM); }
static void word_kill(char *names) { filter_out(names, SECCOMP_RET_KILL_PROCESS); }

/* What happens from outside while it runs. */
static void word_sigkill(char *us) { kill_after_us = atoi(us); }
/* sigkill-at-clone=US: killed between its clone of a process and that one's first step, after US microseconds if it makes none. */
static int is_killed_at_clone;
static void word_sigkill_at_clone(char *us) { is_killed_at_clone = 1, word_sigkill(us); }
static void word_kill_recorder(char *us) { hurt_after_us = atoi(us), hurt_signal = SIGKILL; }
static void word_stop_recorder(char *us) { hurt_after_us = atoi(us), hurt_signal = SIGSTOP; }

static const struct { const char *name; void (*act)(char *); } words[] = {
    {"tmpfs", word_tmpfs}, {"readonly", word_readonly}, {"no-shm", word_no_shm}, {"pid", word_pid}, {"hidepid", word_hidepid},
    {"proc", word_proc}, {"no-proc", word_no_proc}, {"limit", word_limit}, {"nobody", word_nobody}, {"undumpable", word_undumpable},
    {"subreaper", word_subreaper}, {"closed", word_closed}, {"fifo", word_fifo}, {"pin", word_pin}, {"folder-gone", word_folder_gone},
    {"first", word_first}, {"last", word_last}, {"errno", word_errno}, {"kill", word_kill}, {"sigkill", word_sigkill},
    {"sigkill-at-clone", word_sigkill_at_clone},
    {"kill-recorder", word_kill_recorder}, {"stop-recorder", word_stop_recorder},
};

static void set_limit(int which)
{
    struct rlimit limit = {limits[which], limits[which]};
    if (has_limit[which]) need(setrlimit(which, &limit) == 0, "a limit");
}

static void enter(void)
{
    if (is_in_own_proc) need(mount("proc", "/proc", "proc", 0, proc_options) == 0, "a /proc of its own");
    if (is_folder_gone) {
        char folder[] = "/tmp/torture.XXXXXX";
        need(mkdtemp(folder) && chdir(folder) == 0 && rmdir(folder) == 0, folder);
    }
    if (pinned_to >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(pinned_to, &set);
        need(sched_setaffinity(0, sizeof set, &set) == 0, "affinity");
    }
    if (is_fifo) {
        struct sched_param parameter = {.sched_priority = 10};
        need(sched_setscheduler(0, SCHED_FIFO, &parameter) == 0, "SCHED_FIFO");
    }
    for (int i = 0; i < (int)RLIM_NLIMITS; i++)
        if (i != RLIMIT_NPROC && i != RLIMIT_AS) set_limit(i);
    if (becomes_nobody) {
        gid_t none = 65534;
        need(setgroups(1, &none) == 0 && setgid(65534) == 0 && setuid(65534) == 0, "another user");
        prctl(PR_SET_DUMPABLE, 1);
    }
    if (is_subreaper) prctl(PR_SET_CHILD_SUBREAPER, 1);
    char list[4096] = "";
    const char *ours = getenv("TORTURE_PRELOAD"), *parts[] = {first_preload, ours, last_preload};
    for (int i = 0; i < 3; i++)
        if (parts[i] && *parts[i]) strcat(strcat(list, *list ? ":" : ""), parts[i]);
    if (*list) setenv("LD_PRELOAD", list, 1);
    if (is_undumpable) setenv("TORTURE_UNDUMPABLE", "1", 1);
    /* Last, because it binds us as well. */
    for (int i = 0; i < (int)RLIM_NLIMITS; i++)
        if (i == RLIMIT_NPROC || i == RLIMIT_AS) set_limit(i);
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    if (has_closed_streams)
        for (int file = 0; file < 3; file++) close(file);
    if (filter_length) {
        struct sock_fprog program = {filter_length, filter};
        need(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS");
        need(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0, "a seccomp filter");
    }
}

/* The recorder of the run: the process with our TORTURE_USAGE in its environment that was called as `gputrace recorder`. */
static pid_t recorder(void)
{
    static char environment[1 << 17];
    char path[300], line[512], wanted[4096];
    pid_t found = 0;
    snprintf(wanted, sizeof wanted, "TORTURE_USAGE=%s", getenv("TORTURE_USAGE"));
    DIR *processes = opendir("/proc");
    for (struct dirent *entry; processes && !found && (entry = readdir(processes));) {
        int pid = atoi(entry->d_name);
        if (pid <= 0) continue;
        snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n = file < 0 ? -1 : read(file, line, sizeof line - 1);
        if (file >= 0) close(file);
        if (n <= 0) continue;
        line[n] = 0;
        const char *verb = line + strlen(line) + 1;
        if (verb >= line + n || strcmp(verb, "recorder") != 0) continue;
        snprintf(path, sizeof path, "/proc/%d/environ", pid);
        file = open(path, O_RDONLY | O_CLOEXEC);
        n = file < 0 ? -1 : read(file, environment, sizeof environment - 1);
        if (file >= 0) close(file);
        if (n > 0 && memmem(environment, (size_t)n, wanted, strlen(wanted))) found = pid;
    }
    if (processes) closedir(processes);
    return found;
}

static void sleep_us(long us)
{
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&time, NULL);
}

/* The process, no thread, that a thread has just made; 0 if it stopped for another reason. */
static pid_t made_by(pid_t thread, int status)
{
    char path[64];
    unsigned long child = 0;
    int event = status >> 8;
    if (event != (SIGTRAP | PTRACE_EVENT_VFORK << 8) && event != (SIGTRAP | PTRACE_EVENT_CLONE << 8)) return 0;
    ptrace(PTRACE_GETEVENTMSG, thread, NULL, &child);
    snprintf(path, sizeof path, "/proc/%d/task/%lu", (int)thread, child);
    return access(path, F_OK) == 0 ? 0 : (pid_t)child;
}

/* The last of its threads that is waited for is the first one. */
static int ends(pid_t program, int *status, struct rusage *usage)
{
    pid_t who = wait4(-1, status, __WALL, usage);
    return who >= 0 && (who != program || WIFSTOPPED(*status));
}

/* Lets the program run until it makes a child that shares its memory, and kills it while the child stands still. */
static void kill_at_clone(pid_t program, int *status, struct rusage *usage)
{
    for (long waited = 0; waited < kill_after_us;) {
        pid_t child, who = wait4(-1, status, WNOHANG | __WALL, usage);
        if (who <= 0) {
            sleep_us(100);
            waited += 100;
        } else if ((child = made_by(who, *status))) {
            kill(program, SIGKILL);
            int stop;
            waitpid(child, &stop, __WALL);
            while (ends(program, status, usage)) {}
            ptrace(PTRACE_DETACH, child, NULL, NULL);
            return;
        } else if (WIFSTOPPED(*status)) {
            int is_signal = *status >> 16 == 0;
            ptrace(PTRACE_CONT, who, NULL, (void *)(long)(is_signal ? WSTOPSIG(*status) : 0));
        } else if (who == program) return;
    }
    kill(program, SIGKILL);
    while (ends(program, status, usage)) {}
}

int main(int argc, char **argv)
{
    int at = 1;
    for (; at < argc && strcmp(argv[at], "--") != 0; at++) {
        char *rest = argv[at], *name = strsep(&rest, "=");
        size_t i = 0;
        while (i < sizeof words / sizeof *words && strcmp(words[i].name, name) != 0) i++;
        if (i == sizeof words / sizeof *words) errno = EINVAL, skip(name);
        words[i].act(rest);
    }
    if (at + 1 >= argc) errno = EINVAL, skip("no program");
    int ready[2];
    need(pipe(ready) == 0, "a pipe");
    pid_t program = fork();
    need(program >= 0, "fork");
    if (program == 0) {
        char byte;
        close(ready[1]);
        if (read(ready[0], &byte, 1) != 0) _exit(126);
        close(ready[0]);
        enter();
        execvp(argv[at + 1], argv + at + 1);
        fprintf(stderr, "launch: %s: %s\n", argv[at + 1], strerror(errno));
        _exit(126);
    }
    int status = 0;
    pid_t hurt = 0;
    struct rusage usage = {0};
    if (is_killed_at_clone && ptrace(PTRACE_SEIZE, program, NULL, (void *)(long)(PTRACE_O_TRACEVFORK | PTRACE_O_TRACECLONE)) != 0) {
        int error = errno;
        kill(program, SIGKILL);
        errno = error, skip("ptrace");
    }
    /* From here on it runs. */
    close(ready[0]), close(ready[1]);
    if (is_killed_at_clone) kill_at_clone(program, &status, &usage);
    else if (kill_after_us >= 0) {
        sleep_us(kill_after_us);
        kill(program, SIGKILL);
    }
    if (hurt_after_us >= 0) {
        sleep_us(hurt_after_us);
        while (!(hurt = recorder()) && wait4(program, &status, WNOHANG, &usage) == 0) sleep_us(1000);
        if (hurt) kill(hurt, hurt_signal);
    }
    while (!is_killed_at_clone && wait4(program, &status, 0, &usage) < 0 && errno == EINTR) {}
    if (hurt && hurt_signal == SIGSTOP) kill(hurt, SIGCONT);
    FILE *file = fopen(getenv("TORTURE_USAGE"), "w");
    if (file) {
        fprintf(file, "%ld\n", (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000L + usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
        fclose(file);
    }
    if (WIFSIGNALED(status)) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        signal(WTERMSIG(status), SIG_DFL);
        sigset_t all;
        sigfillset(&all);
        sigprocmask(SIG_UNBLOCK, &all, NULL);
        kill(getpid(), WTERMSIG(status));
    }
    return WEXITSTATUS(status);
}
