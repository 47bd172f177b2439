// C++20 coroutines that are resumed on other threads than they began on, with frames on the heap, and exceptions through callers of the
// driver.
#include "torture.h"
#include <coroutine>
#include <thread>
#include <vector>

struct Task {
    struct promise_type {
        Task get_return_object() { return {std::coroutine_handle<promise_type>::from_promise(*this)}; }
        std::suspend_always initial_suspend() noexcept { return {}; }
        std::suspend_always final_suspend() noexcept { return {}; }
        void return_void() {}
        void unhandled_exception() { std::terminate(); }
    };
    std::coroutine_handle<promise_type> handle;
};

static long failed;
__attribute__((noinline)) static void throws(int depth)
{
    address p = take();
    struct Guard {
        address p;
        ~Guard() { __atomic_fetch_add(&failed, give(p) != 0, __ATOMIC_SEQ_CST); }
    } guard{p};
    if (depth == 0) throw 1;
    throws(depth - 1);
}
static Task run(int turns)
{
    for (int i = 0; i < turns; i++) {
        __atomic_fetch_add(&failed, work(2), __ATOMIC_SEQ_CST);
        try {
            throws(i % 5);
        } catch (int) {
        }
        co_await std::suspend_always{};
    }
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 100;
    begin();
    std::vector<Task> tasks;
    for (int i = 0; i < count; i++) tasks.push_back(run(10));
    for (int turn = 0; turn < 11; turn++) {
        std::vector<std::thread> threads;
        for (int part = 0; part < 4; part++)
            threads.emplace_back([&, part] {
                for (int i = part; i < count; i += 4)
                    if (!tasks[i].handle.done()) tasks[i].handle.resume();
            });
        for (auto &thread : threads) thread.join();
    }
    for (auto &task : tasks) task.handle.destroy();
    printf("%d coroutines, %ld failed\n", count, failed);
}
