/* What is allocated now, found by address: a tree of ranges in which two ranges that overlap are equal. */
#define _GNU_SOURCE
#include "fake.h"

#include <search.h>
#include <stdlib.h>

static void *tree;
static uint64_t next_id = 1;

static int compare(const void *left, const void *right)
{
    const struct allocation *a = left, *b = right;
    if (a->base + a->extent <= b->base) return -1;
    if (b->base + b->extent <= a->base) return 1;
    return 0;
}

struct allocation *book_add(struct allocation entry)
{
    struct allocation *copy = malloc(sizeof *copy);
    if (!copy) return NULL;
    *copy = entry;
    copy->id = next_id++;
    struct allocation **at = tsearch(copy, &tree, compare);
    if (at && *at == copy) return copy;
    free(copy);
    return NULL;
}

struct allocation *book_at(CUdeviceptr address)
{
    struct allocation key = {.base = address, .extent = 1};
    struct allocation **at = tfind(&key, &tree, compare);
    return at ? *at : NULL;
}

struct allocation *book_starting_at(CUdeviceptr base)
{
    struct allocation *entry = book_at(base);
    return entry && entry->base == base ? entry : NULL;
}

void book_remove(struct allocation *entry)
{
    tdelete(entry, &tree, compare);
    free(entry);
}

struct search {
    struct context *context;
    struct allocation *found;
};

static void visit(const void *node, VISIT order, void *closure)
{
    struct search *search = closure;
    struct allocation *entry = *(struct allocation *const *)node;
    if (order != preorder && order != leaf) return;
    if (!search->found && entry->context == search->context) search->found = entry;
}

void book_remove_context(struct context *context, void (*release)(struct allocation *))
{
    for (;;) { /* the tree may not change while it is walked */
        struct search search = {context, NULL};
        twalk_r(tree, visit, &search);
        if (!search.found) return;
        release(search.found);
    }
}
