// PyTorch's process groups, as `torch/csrc/distributed/c10d` has them, in three parts that are built from this file:
//
//   TORCH_CPU   libtorch_cpu.so: `ProcessGroup`, which is told its name and asked for its backend
//   TORCH_CUDA  libtorch_cuda.so: makes the communicator of a group that was asked, as `ProcessGroupNCCL` does
//   neither     the program: makes groups and communicators, its own ones too, and catches what `getBackend` throws
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

extern "C" {
typedef struct { char internal[128]; } ncclUniqueId;
int ncclGetUniqueId(ncclUniqueId *id);
int ncclCommInitRank(void **comm, int n_ranks, ncclUniqueId id, int rank);
int ncclCommDestroy(void *comm);
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
}

#define EXPORTED __attribute__((visibility("default")))

namespace c10 {
enum class DeviceType : signed char { CPU = 0, CUDA = 1 };
// A result that is written where the caller says, as that of `getBackend`.
struct Pointer {
    long value;
    EXPORTED ~Pointer() {}
};
}  // namespace c10

namespace c10d {
class EXPORTED ProcessGroup {
  public:
    virtual void setGroupName(const std::string &name);
    virtual void setGroupDesc(const std::string &name);
    c10::Pointer getBackend(c10::DeviceType type);
    std::string name, description;
    bool has_backend = true;
};
EXPORTED void *communicator(ProcessGroup &group);

#ifdef TORCH_CPU
void ProcessGroup::setGroupName(const std::string &text) { name = text; }
void ProcessGroup::setGroupDesc(const std::string &text) { description = text; }
c10::Pointer ProcessGroup::getBackend(c10::DeviceType type) {
    if (!has_backend) throw std::runtime_error(name + " has no backend");
    return c10::Pointer{static_cast<long>(type) + 40};
}
#elif defined(TORCH_CUDA)
void *communicator(ProcessGroup &group) {
    if (group.getBackend(c10::DeviceType::CUDA).value != 41) abort();
    ncclUniqueId id;
    void *comm = nullptr;
    if (ncclGetUniqueId(&id) != 0 || ncclCommInitRank(&comm, 1, id, 0) != 0) abort();
    return comm;
}
#endif
}  // namespace c10d

#if !defined(TORCH_CPU) && !defined(TORCH_CUDA)
using c10::DeviceType;
using c10d::ProcessGroup;

static void *own_communicator() {
    ncclUniqueId id;
    void *comm = nullptr;
    if (ncclGetUniqueId(&id) != 0 || ncclCommInitRank(&comm, 1, id, 0) != 0) abort();
    return comm;
}

static ProcessGroup *group(const char *name, const char *description) {
    // A new object each, as in PyTorch; volatile: the call goes through the table of virtual functions.
    ProcessGroup *volatile made = new ProcessGroup;
    made->setGroupName(name);
    if (description) made->setGroupDesc(description);
    return made;
}

int main() {
    // Named before the process has a context.
    ProcessGroup *world = group("0", "default_pg");
    void *context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) abort();
    ProcessGroup *tensor = group("1", "tensor parallel, a description that is longer than a string holds in itself");
    ProcessGroup *plain = group("2", nullptr);
    void *comms[8] = {c10d::communicator(*world), c10d::communicator(*tensor), c10d::communicator(*plain)};
    // A group that is asked, and a communicator that somebody else makes then.
    if (tensor->getBackend(DeviceType::CUDA).value != 41) abort();
    comms[3] = own_communicator();
    // What works on processors is another backend.
    if (tensor->getBackend(DeviceType::CPU).value != 40) abort();
    comms[4] = own_communicator();
    world->has_backend = false;
    try {
        world->getBackend(DeviceType::CUDA);
        abort();
    } catch (const std::runtime_error &error) {
        puts(error.what());
    }
    // A group that nobody named.
    ProcessGroup unnamed;
    comms[5] = c10d::communicator(unnamed);
    // Another group where one was that had a description; what is longer than anybody reads is cut.
    tensor->setGroupName("3" + std::string(200, 'x'));
    comms[6] = c10d::communicator(*tensor);
    // More groups than are remembered: the oldest are forgotten.
    for (int i = 0; i < 200; i++) group("many", "groups");
    comms[7] = c10d::communicator(*plain);
    for (void *comm : comms) ncclCommDestroy(comm);
    printf("%s %s, %s, %zu\n", world->name.c_str(), world->description.c_str(), tensor->description.c_str(), tensor->name.size());
}
#endif
