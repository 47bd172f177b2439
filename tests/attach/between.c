/* A child that shares its parent's memory, as between vfork and exec, and stands still there until its standard input ends. It prints its
 * number before. The parent, which has loaded the driver, waits for it in the meantime and then says that its memory is as it was. */
#include "../programs/api.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

static char memory[1 << 16];

int main(void)
{
    char byte;
    CHECK(dlopen("libcuda.so.1", RTLD_NOW));
    pid_t child = vfork();
    if (child == 0) {
        char line[64];
        int n = snprintf(line, sizeof line, "ready\n%d\n", getpid());
        if (write(1, line, (size_t)n) != n) _exit(1);
        while (read(0, &byte, 1) > 0) {}
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    for (size_t i = 0; i < sizeof memory; i++) CHECK(!memory[i]);
    CHECK(write(1, "as it was\n", 10) == 10);
    return 0;
}
