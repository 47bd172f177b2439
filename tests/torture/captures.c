/* Threads capture streams into graphs, launch and destroy them while the process forks, with a capture of its own open; children end
 * that capture, or begin others, or leave it: `captures COUNT`. */
#include "torture.h"

int cuStreamBeginCapture_v2(void *, int), cuStreamEndCapture(void *, void **), cuGraphDestroy(void *);
int cuGraphInstantiateWithFlags(void **, void *, unsigned long long), cuGraphLaunch(void *, void *), cuGraphExecDestroy(void *);

/* Ends the capture of a stream, and runs what it captured. */
static int run(void *stream)
{
    void *graph = NULL, *made = NULL;
    int wrong = cuStreamEndCapture(stream, &graph) || cuGraphInstantiateWithFlags(&made, graph, 0);
    for (int i = 0; i < 3; i++) wrong |= cuGraphLaunch(made, stream);
    return wrong | cuGraphExecDestroy(made) | cuGraphDestroy(graph);
}

static long capture(void *stream)
{
    int wrong = cuStreamBeginCapture_v2(stream, 0) != 0;
    long failed = work(3);
    return failed + (wrong | run(stream));
}

static void *capture_on(void *stream)
{
    long failed = 0;
    while (!stop) failed += capture(stream), rest(2000);
    return (void *)failed;
}

int main(int argc, char **argv)
{
    if (argc < 2) return 2;
    begin();
    char streams[4];
    void *threads[3];
    long wrong = 0;
    for (int i = 0; i < 3; i++) threads[i] = start(capture_on, &streams[i]);
    for (int i = 0; i < atoi(argv[1]); i++) {
        wrong += cuStreamBeginCapture_v2(&streams[3], 0);
        pid_t child = fork();
        if (child == 0) {
            in_child();
            long bad = i % 3 == 0 ? run(&streams[3]) : i % 3 == 1 ? capture(&streams[0]) : 0;
            _exit(bad + work(5) ? 1 : 7);
        }
        wrong += run(&streams[3]) + work(3);
        int status = 0;
        wrong += waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 7;
    }
    stop = 1;
    for (int i = 0; i < 3; i++) wrong += (long)join(threads[i]);
    printf("%ld wrong\n", wrong);
    return wrong != 0;
}
