//! Memory shared between processes: an IPC handle and a file descriptor of a physical handle. The importer owns nothing.
//# Link: cuda
//# Expect: cuMemAlloc_v2 3000000 freed
//# Expect: cuMemCreate 2097152 freed
#define _GNU_SOURCE
#include "api.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

struct message { CUipcMemHandle ipc; };

static void start(void)
{
    void *context;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
}

static void importer(int socket)
{
    struct message message;
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec data = {&message, sizeof message};
    struct msghdr header = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    CHECK(recvmsg(socket, &header, 0) == sizeof message);
    int fd = *(int *)CMSG_DATA(CMSG_FIRSTHDR(&header));

    start();
    CUdeviceptr p, base;
    CUhandle handle;
    size_t before, after;
    OK(cuMemGetInfo_v2(&before, NULL));
    OK(cuIpcOpenMemHandle_v2(&p, message.ipc, 1));
    RETURNS(1, cuMemFree_v2(p)); /* not its to free */
    OK(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, 1));
    OK(cuMemAddressReserve(&base, 2 * MIB, 0, 0, 0));
    OK(cuMemMap(base, 2 * MIB, 0, handle, 0));
    OK(cuMemGetInfo_v2(&after, NULL));
    CHECK(before == after);
    OK(cuMemUnmap(base, 2 * MIB));
    OK(cuMemAddressFree(base, 2 * MIB));
    OK(cuMemRelease(handle));
    OK(cuIpcCloseMemHandle(p));
    RETURNS(1, cuIpcCloseMemHandle(p));
    exit(0);
}

int main(void)
{
    int sockets[2], status, fd;
    CHECK(socketpair(AF_UNIX, SOCK_DGRAM, 0, sockets) == 0);
    pid_t child = fork();
    if (child == 0) importer(sockets[1]);

    start();
    CUdeviceptr p, mine;
    CUhandle handle;
    CUmemAllocationProp prop = {.type = 1, .handle_types = 1, .location = {1, 0}};
    struct message message;
    OK(cuMemAlloc_v2(&p, 3000000));
    OK(cuIpcGetMemHandle(&message.ipc, p));
    RETURNS(201, cuIpcOpenMemHandle_v2(&mine, message.ipc, 1)); /* not in the process that made it */
    OK(cuMemCreate(&handle, 2 * MIB, &prop, 0));
    OK(cuMemExportToShareableHandle(&fd, handle, 1, 0));

    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec data = {&message, sizeof message};
    struct msghdr header = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    *rights = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    CHECK(sendmsg(sockets[0], &header, 0) == sizeof message);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(cuMemRelease(handle));
    OK(cuMemFree_v2(p));
    return 0;
}
