/* How many libraries with thread-local variables of the `initial-exec` model can still be loaded: there is room for few, and a library that
 * takes of it breaks others' plugins. `statictls LIBRARY` */
#include "torture.h"

int main(int argc, char **argv)
{
    char path[4200], buffer[1 << 16];
    int n_loaded = 0;
    if (argc < 2) return 2;
    begin();
    work(10);
    for (; n_loaded < 64; n_loaded++) {
        snprintf(path, sizeof path, "%s/tls.%d.so", getenv("TORTURE_FOLDER"), n_loaded);
        int from = open(argv[1], O_RDONLY), file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0700);
        for (ssize_t n; (n = read(from, buffer, sizeof buffer)) > 0;)
            if (write(file, buffer, (size_t)n) != n) die(path);
        close(from);
        close(file);
        if (!dlopen(path, RTLD_NOW)) break;
    }
    printf("%d loaded, %ld failed\n", n_loaded, work(10));
    return 0;
}
