/* What happens around every entry point: initialisation, scripted failures, the lock and the call log.
 *
 * Environment:
 *   FAKE_CUDA_DEVICES=n           number of devices, 0 to 16 (default 1)
 *   FAKE_CUDA_DRIVER=13050        the driver's version
 *   FAKE_CUDA_FAIL=f:n:code,...   the n-th call of f in this process returns code without doing anything;
 *                                 `n+` from the n-th on, `*` every call. Example: cuMemAlloc_v2:3:2
 *   FAKE_CUDA_LOG=file            appends one line a call: pid, thread, name, arguments, `= result`
 *   FAKE_CUDA_LOG_ALL=1           also logs calls that only ask
 * The variables are read at the first call. */
#define _GNU_SOURCE
#include "device.h"
#include "fake.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct script {
    struct script *next;
    char function[64];
    unsigned long first;
    enum { ONCE, FROM, ALWAYS } when;
    CUresult result;
    unsigned long calls;
};

bool log_queries;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct script *scripts;
static int log_file = -1, devices, version;
static pid_t initialized_by;

static void read_scripts(const char *text)
{
    char *copy = strdup(text), *save = NULL;
    for (char *item = strtok_r(copy, ",", &save); item; item = strtok_r(NULL, ",", &save)) {
        struct script *script = calloc(1, sizeof *script);
        char when[32];
        if (sscanf(item, "%63[^:]:%31[^:]:%d", script->function, when, &script->result) != 3) {
            fprintf(stderr, "fake libcuda: FAKE_CUDA_FAIL: `%s` is not FUNCTION:N:CODE; ignored\n", item);
            free(script);
            continue;
        }
        script->first = strtoul(when, NULL, 10);
        script->when = when[0] == '*' ? ALWAYS : strchr(when, '+') ? FROM : ONCE;
        script->next = scripts;
        scripts = script;
    }
    free(copy);
}

/* A forked child of a process that used CUDA cannot use it; one whose parent never did starts afresh. */
static void in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    usage_forget_in_child();
}

static void start(void)
{
    const char *text;
    devices = device_env_only() < 0 ? device_env_count() : device_env_count() > 0;
    version = device_env_driver_version();
    if ((text = getenv("FAKE_CUDA_FAIL"))) read_scripts(text);
    if ((text = getenv("FAKE_CUDA_LOG")) && *text) {
        log_file = open(text, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (log_file < 0) fprintf(stderr, "fake libcuda: FAKE_CUDA_LOG=%s: %s\n", text, strerror(errno));
    }
    log_queries = getenv("FAKE_CUDA_LOG_ALL") != NULL;
    pthread_atfork(NULL, NULL, in_child);
}

static CUresult scripted(const char *function)
{
    CUresult result = CUDA_SUCCESS;
    for (struct script *script = scripts; script; script = script->next) {
        if (strcmp(script->function, function) != 0) continue;
        script->calls++;
        if (script->when == ALWAYS || script->calls == script->first ||
            (script->when == FROM && script->calls > script->first))
            result = script->result;
    }
    return result;
}

/* On success the lock is held until `call_leave`. */
CUresult call_enter(const char *function, enum need need)
{
    pthread_once(&once, start);
    if (need != NEEDS_NOTHING && initialized_by != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    CUresult result = scripted(function);
    if (result == CUDA_SUCCESS && need == NEEDS_CONTEXT) {
        struct context *context = context_current();
        if (!context) result = CUDA_ERROR_INVALID_CONTEXT;
        else if (!context->alive) result = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    if (result != CUDA_SUCCESS) pthread_mutex_unlock(&lock);
    return result;
}

void call_leave(void) { pthread_mutex_unlock(&lock); }

CUresult call_initialize(void)
{
    if (initialized_by && initialized_by != getpid()) return CUDA_ERROR_NOT_INITIALIZED;
    if (devices == 0) return CUDA_ERROR_NO_DEVICE;
    initialized_by = getpid();
    return CUDA_SUCCESS;
}

int driver_version(void) { return version; }
int device_count(void) { return devices; }

/* One `write` a line, so that lines of several threads and processes do not mix. */
void call_log(const char *function, CUresult result, const char *format, ...)
{
    if (log_file < 0) return;
    int saved = errno;
    char line[512];
    int n = snprintf(line, sizeof line, "%d %ld %s ", (int)getpid(), (long)syscall(SYS_gettid), function);
    va_list arguments;
    va_start(arguments, format);
    n += vsnprintf(line + n, sizeof line - (size_t)n, format, arguments);
    va_end(arguments);
    if (n > (int)sizeof line - 16) n = (int)sizeof line - 16;
    while (line[n - 1] == ' ') n--;
    n += snprintf(line + n, sizeof line - (size_t)n, " = %d\n", result);
    if (write(log_file, line, (size_t)n) != n) log_file = -1;
    errno = saved;
}
