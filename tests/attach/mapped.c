/* A hostile process of which somebody else reads the files that it has mapped: mapped MODE VICTIM. VICTIM is a file of that other user's,
 * which this one may name and not read. A thread of it waits in code of a mapped library, so that whoever shows its stacks looks for the
 * tables and the names of that library. What is at the library's path then, or in it:
 *
 *   fifo, folder, device   one of these, of which a mount of the process's own makes the library's path lead there
 *   secret                 a link to the victim, which has the library's name
 *   turns                  in turn the library, a FIFO, a link to the victim and nothing
 *   sparse                 10 GiB of nothing behind it
 *   symbols                a table of 400 million symbols
 *   frames                 an entry of 3 GiB in the table of frames
 *   version                `version.py` of a PyTorch of its own is a FIFO, a link to the victim, a folder and 10 GiB, in turn
 *
 * Status 77: this machine forbids what the mode needs. */
#include "../programs/api.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, CODE = PAGE, NAMES = 0x2000, INDEX = 0x2100, FRAMES = 0x3000, SECTIONS = 6 };
static const uint64_t LARGE = 10UL << 30, ENTRY = 3UL << 30;
static const char names[] = "\0.text\0.eh_frame\0.eh_frame_hdr\0.symtab\0.strtab";
static char folder[160], library[224], own[224];
static const char *mode, *victim;

static int is(const char *name) { return !strcmp(mode, name); }

static uint32_t name(const char *of)
{
    for (size_t at = 0; at < sizeof names; at += strlen(names + at) + 1)
        if (!strcmp(names + at, of)) return (uint32_t)at;
    abort();
}

/* `pause`, and back. */
static const unsigned char code[] = {0x50, 0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0x58, 0xc3};

static void put(int file, const void *bytes, size_t n, uint64_t at) { CHECK(pwrite(file, bytes, n, (off_t)at) == (ssize_t)n); }

static void write_library(const char *path)
{
    int file = open(path, O_RDWR | O_CREAT | O_EXCL, 0755);
    int is_large = is("symbols") || is("sparse") || is("frames");
    Elf64_Ehdr head = {.e_type = ET_DYN, .e_machine = EM_X86_64, .e_version = 1, .e_phoff = 64, .e_shoff = 512, .e_ehsize = 64};
    Elf64_Phdr segment = {PT_LOAD, PF_R | PF_X, 0, 0, 0, 2 * PAGE, 2 * PAGE, PAGE};
    Elf64_Shdr sections[SECTIONS] = {
        {0},
        {name(".text"), SHT_PROGBITS, SHF_ALLOC | SHF_EXECINSTR, CODE, CODE, PAGE, 0, 0, 16, 0},
        {name(".eh_frame"), SHT_PROGBITS, SHF_ALLOC, FRAMES, FRAMES, ENTRY + 128, 0, 0, 8, 0},
        {name(".eh_frame_hdr"), SHT_PROGBITS, SHF_ALLOC, INDEX, INDEX, 20, 0, 0, 4, 0},
        {name(".symtab"), SHT_SYMTAB, 0, 0, FRAMES, (LARGE - FRAMES) / 24 * 24, 5, 1, 8, sizeof(Elf64_Sym)},
        {name(".strtab"), SHT_STRTAB, 0, 0, NAMES, sizeof names, 0, 0, 1, 0},
    };
    /* A common entry, and one for the code: what follows in it are instructions that do nothing. */
    static const unsigned char common[] = {20, 0, 0, 0, 0, 0, 0, 0, 1, 'z', 'R', 0, 1, 0x78, 16, 1, 0x1b, 12, 7, 8, 0x90, 1, 0, 0};
    int32_t entry[5] = {(int32_t)(ENTRY & 0xffffffff), 28, CODE - (FRAMES + 32), PAGE, 0};
    int32_t index[5] = {0x3b031b01, FRAMES - INDEX - 4, 1, CODE - INDEX, FRAMES + 24 - INDEX};
    memcpy(head.e_ident, "\x7f" "ELF\2\1\1", 7);
    head.e_phentsize = sizeof segment, head.e_phnum = 1, head.e_shentsize = sizeof *sections, head.e_shnum = SECTIONS, head.e_shstrndx = 5;
    if (!is("frames")) sections[2].sh_type = sections[3].sh_type = SHT_NULL;
    if (!is("symbols")) sections[4].sh_type = SHT_NULL;
    CHECK(file >= 0 && !ftruncate(file, is_large ? (off_t)LARGE : 4 * PAGE));
    put(file, &head, sizeof head, 0);
    put(file, &segment, sizeof segment, 64);
    put(file, sections, sizeof sections, 512);
    put(file, code, sizeof code, CODE);
    put(file, names, sizeof names, NAMES);
    put(file, index, sizeof index, INDEX);
    if (is("frames")) {
        put(file, common, sizeof common, FRAMES);
        put(file, entry, 17, FRAMES + 24);
    }
    close(file);
}

static void *waits(void *at)
{
    ((void (*)(void))((char *)at + CODE))();
    return NULL;
}

/* What the path of a mapped file leads to is ours to say where we have mounts of our own. */
static void cover(const char *with)
{
    char text[64];
    int uid = (int)getuid(), gid = (int)getgid(), file;
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS)) exit(77);
    file = open("/proc/self/setgroups", O_WRONLY);
    if (file < 0 || write(file, "deny", 4) != 4) exit(77);
    close(file);
    for (int which = 0; which < 2; which++) {
        int id = which ? gid : uid, n = snprintf(text, sizeof text, "%d %d 1", id, id);
        file = open(which ? "/proc/self/gid_map" : "/proc/self/uid_map", O_WRONLY);
        if (file < 0 || write(file, text, n) != n) exit(77);
        close(file);
    }
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount(with, library, NULL, MS_BIND, NULL)) exit(77);
}

static void *turn(void *unused)
{
    char next[224];
    (void)unused;
    snprintf(next, sizeof next, "%s/next", folder);
    for (unsigned round = 0;; round++) {
        switch (round % 4) {
        case 0: CHECK(!mkfifo(next, 0666) && !rename(next, library)); break;
        case 1: CHECK(!symlink(victim, next) && !rename(next, library)); break;
        case 2: CHECK(!unlink(library)); break;
        case 3: CHECK(!link(own, library)); break;
        }
    }
}

static void *turn_version(void *unused)
{
    char path[224];
    (void)unused;
    snprintf(path, sizeof path, "%s/torch/version.py", folder);
    for (unsigned round = 0;; round++, usleep(1000)) {
        int file;
        if (unlink(path) && errno == EISDIR) rmdir(path);
        switch (round % 4) {
        case 0: CHECK(!mkfifo(path, 0666)); break;
        case 1: CHECK(!symlink(victim, path)); break;
        case 2: CHECK(!mkdir(path, 0777)); break;
        case 3:
            file = open(path, O_RDWR | O_CREAT | O_EXCL, 0644);
            CHECK(file >= 0 && !ftruncate(file, (off_t)LARGE));
            close(file);
            break;
        }
    }
}

int main(int argc, char **argv)
{
    char other[224];
    void *context, *at;
    pthread_t thread;
    int file;
    CHECK(argc == 3);
    mode = argv[1], victim = argv[2];
    snprintf(folder, sizeof folder, "mapped.%d", getpid());
    CHECK(!mkdir(folder, 0777) && realpath(folder, other) && strlen(other) < sizeof folder);
    strcpy(folder, other);
    snprintf(own, sizeof own, "%s/torch", folder);
    CHECK(!mkdir(own, 0777));
    strcat(own, "/lib");
    CHECK(!mkdir(own, 0777));
    snprintf(library, sizeof library, "%s/%s", own, is("version") ? "libc10.so" : "libmapped.so");
    snprintf(own, sizeof own, "%s/own", folder);
    write_library(own);
    CHECK(!link(own, library));
    snprintf(other, sizeof other, "%s/other", folder);
    if (is("fifo")) CHECK(!mkfifo(other, 0666));
    file = open(library, O_RDONLY);
    at = mmap(NULL, 2 * PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);
    CHECK(at != MAP_FAILED);
    close(file);
    if (is("fifo")) cover(other);
    if (is("device")) cover("/dev/zero");
    if (is("folder")) CHECK(!unlink(library) && !mkdir(library, 0777));
    if (is("secret")) CHECK(!unlink(library) && !symlink(victim, library));
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    CHECK(!pthread_create(&thread, NULL, waits, at));
    if (is("turns")) CHECK(!pthread_create(&thread, NULL, turn, NULL));
    if (is("version")) CHECK(!pthread_create(&thread, NULL, turn_version, NULL));
    printf("ready\n");
    fflush(stdout);
    fcntl(0, F_SETFL, O_NONBLOCK);
    for (;;) {
        char byte;
        ssize_t n = read(0, &byte, 1);
        CUdeviceptr block;
        if (n == 0 || (n < 0 && errno != EAGAIN)) return 0;
        OK(cuMemAlloc_v2(&block, 4096));
        OK(cuMemFree_v2(block));
        usleep(1000);
    }
}
