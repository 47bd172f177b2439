/* Daemons close every descriptor they do not know, early or late, and then open files of their own that get the same numbers: what is
 * written to them is what they hold. `closes early|late|often` */
#include "torture.h"

static void close_from(int first)
{
    for (int file = first; file < 4096; file++) close(file);
}

static int files[40];
static void open_files(const char *folder)
{
    char path[4200];
    for (int i = 0; i < 40; i++) {
        snprintf(path, sizeof path, "%s/file.%d", folder, i);
        files[i] = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
        if (files[i] < 0 || write(files[i], path, strlen(path)) < 0) die(path);
    }
}
static void check_files(const char *folder)
{
    char path[4200], found[8192];
    int wrong = 0;
    for (int i = 0; i < 40; i++) {
        snprintf(path, sizeof path, "%s/file.%d", folder, i);
        ssize_t n = pread(files[i], found, sizeof found, 0);
        wrong += n != (ssize_t)strlen(path) || memcmp(path, found, (size_t)n) != 0;
    }
    printf("first is %d, %d of the files are not what they were\n", files[0], wrong);
}

int main(int argc, char **argv)
{
    const char *when = argc > 1 ? argv[1] : "early", *folder = getenv("TORTURE_FOLDER");
    begin();
    if (!strcmp(when, "early")) close_from(3), open_files(folder);
    work(200);
    rest(20000);
    if (!strcmp(when, "late")) close_from(3), open_files(folder);
    for (int i = 0; !strcmp(when, "often") && i < 50; i++) {
        close_from(3);
        open_files(folder);
        work(20);
    }
    void *thread = start(work_on, (void *)100L);
    work(2000);
    rest(300000);
    stop = 1;
    join(thread);
    check_files(folder);
    return 0;
}
