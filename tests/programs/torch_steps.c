//! Training steps of the stand-in for PyTorch: a forward pass, a backward pass in a thread of its own, and temporary blocks
//! on a second stream. Prints how many blocks were handed out and taken back.
//# Link: torch
//# Args: 3
//# Expect: cuMemAlloc_v2 2097152 leaked x7
//# Expect: cuMemAlloc_v2 20971520 leaked
#include "api.h"

#include <pthread.h>
#include <semaphore.h>

enum { LAYERS = 40 };

void *fake_torch_empty(size_t);
void fake_torch_delete(void *), fake_torch_set_stream(int64_t);

static void *activations[LAYERS];
static long n_events;
static sem_t forward_is_done, backward_is_done;

static void *empty(size_t bytes)
{
    void *block = fake_torch_empty(bytes);
    CHECK(block);
    n_events++;
    return block;
}

static void delete(void *block)
{
    fake_torch_delete(block);
    n_events++;
}

static void forward(void)
{
    for (int layer = 0; layer < LAYERS; layer++) {
        void *temporary = empty(1000 + 4000 * layer);
        activations[layer] = empty(layer % 8 ? 300000 : 1500000);
        delete(temporary);
    }
    fake_torch_set_stream(7);
    delete(empty(70000));
    delete(empty(90000));
    fake_torch_set_stream(0);
}

static void *backward(void *unused)
{
    for (;;) {
        sem_wait(&forward_is_done);
        for (int layer = LAYERS; layer-- > 0;) {
            void *gradient = empty(600 + 2000 * layer);
            delete(activations[layer]);
            delete(gradient);
        }
        sem_post(&backward_is_done);
    }
    return unused;
}

int main(int argc, char **argv)
{
    int n_steps = argc > 1 ? atoi(argv[1]) : 3;
    pthread_t thread;
    CHECK(sem_init(&forward_is_done, 0, 0) == 0 && sem_init(&backward_is_done, 0, 0) == 0);
    CHECK(pthread_create(&thread, NULL, backward, NULL) == 0);
    for (int step = 0; step < n_steps; step++) {
        forward();
        sem_post(&forward_is_done);
        sem_wait(&backward_is_done);
    }
    printf("%ld\n", n_events);
    return 0;
}
