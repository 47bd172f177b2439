/* Has as many children as its user may have processes: `quota N`. The user is its own, so that nobody else's processes count. */
#include "torture.h"
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 8, failed = 0;
    pid_t children[64];
    struct rlimit limit = {(rlim_t)n + 1, (rlim_t)n + 1};
    struct __user_cap_header_struct version = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct rights[2];
    uid_t user = 1000000000u + (uid_t)getpid();
    open_page();
    /* It stays the owner of its files. The limit holds for whoever has neither of these rights. */
    if (n < 1 || n > 64 || setrlimit(RLIMIT_NPROC, &limit) || setresuid(user, (uid_t)-1, (uid_t)-1)) die("a user of its own");
    if (syscall(SYS_capget, &version, rights)) die("capget");
    rights[0].effective &= ~(1u << CAP_SYS_ADMIN | 1u << CAP_SYS_RESOURCE);
    rights[0].permitted &= ~(1u << CAP_SYS_ADMIN | 1u << CAP_SYS_RESOURCE);
    if (syscall(SYS_capset, &version, rights)) die("capset");
    begin();
    work(100);
    for (int i = 0; i < n; i++) {
        children[i] = fork();
        if (children[i] == 0) pause(), _exit(0);
        failed += children[i] < 0;
    }
    for (int i = 0; i < n; i++)
        if (children[i] > 0) kill(children[i], SIGKILL), waitpid(children[i], NULL, 0);
    printf("%d of %d children could not be made\n", failed, n);
    work(100);
    return 0;
}
