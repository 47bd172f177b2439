/* Uses CUDA in a mounted folder, leaves it and unmounts it: `unmount FOLDER`. Its recorder may need a moment to leave the folder too. */
#include "torture.h"
#include <sys/mount.h>

int main(int argc, char **argv)
{
    if (argc < 2 || chdir(argv[1]) != 0) die("chdir");
    begin();
    work(100);
    if (chdir("/") != 0) die("chdir");
    int answer = -1;
    for (int i = 0; i < 2000 && (answer = umount(argv[1])) != 0 && errno == EBUSY; i++) rest(10000);
    printf("unmounted: %s\n", answer == 0 ? "yes" : strerror(errno));
    work(100);
    return 0;
}
