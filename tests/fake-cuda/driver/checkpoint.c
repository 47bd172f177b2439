/* Checkpoints of processes (cuda.h 12.8): of this one, or of another that shares FAKE_CUDA_STATE. Calls of a process that is locked
 * do not wait, as the driver's do: what is tested is what an observer sees. */
#include "fake.h"
#include "usage.h"

static CUresult get_state(int pid, int *out)
{
    int state = usage_state(pid);
    if (!out || state < 0) return CUDA_ERROR_INVALID_VALUE;
    *out = state;
    return CUDA_SUCCESS;
}

static CUresult change(int pid, int from, int to)
{
    if (usage_state(pid) < 0) return CUDA_ERROR_INVALID_VALUE;
    return usage_change_state(pid, from, to) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_STATE;
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, int *state) { QUERY(NEEDS_NOTHING, get_state(pid, state)); }
EXPORT CUresult cuCheckpointProcessLock(int pid, void *args)
{
    CALL(NEEDS_NOTHING, change(pid, PROCESS_RUNNING, PROCESS_LOCKED), "pid=%d args=%p", pid, args);
}
EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, void *args)
{
    CALL(NEEDS_NOTHING, change(pid, PROCESS_LOCKED, PROCESS_CHECKPOINTED), "pid=%d args=%p", pid, args);
}
EXPORT CUresult cuCheckpointProcessRestore(int pid, void *args)
{
    CALL(NEEDS_NOTHING, change(pid, PROCESS_CHECKPOINTED, PROCESS_LOCKED), "pid=%d args=%p", pid, args);
}
EXPORT CUresult cuCheckpointProcessUnlock(int pid, void *args)
{
    CALL(NEEDS_NOTHING, change(pid, PROCESS_LOCKED, PROCESS_RUNNING), "pid=%d args=%p", pid, args);
}
