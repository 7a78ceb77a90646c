/* Physical memory, address ranges and what is mapped where. */
#define _GNU_SOURCE
#include "core.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct allocation {
    uint64_t handle;
    size_t size;
    int descriptor, physical, exportable, references;
    int exported;                 /* the descriptor the driver still counts as its own, or -1 */
    int imported_from;            /* must stay open until access is set, or -1 */
    struct allocation *next;
};

struct range {
    uint64_t address;
    size_t size;
    int flags; /* access: 0, 1 or 3 */
    struct allocation *behind;
    struct range *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *allocations;
static struct range *ranges;
static uint64_t last_handle = 0x5ab00000;

static struct allocation *find(uint64_t handle)
{
    struct allocation *found = allocations;
    while (found && found->handle != handle)
        found = found->next;
    return found && found->references > 0 ? found : NULL;
}

static struct range *find_range(uint64_t address, size_t size)
{
    struct range *found = ranges;
    while (found && !(found->address == address && found->size == size))
        found = found->next;
    return found;
}

static int mapped_times(const struct allocation *allocation)
{
    int times = 0;
    for (struct range *range = ranges; range; range = range->next)
        times += range->behind == allocation;
    return times;
}

static int same_file(int left, int right)
{
    struct stat a, b;
    return !fstat(left, &a) && !fstat(right, &b) && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

static void forget_unused(struct allocation *allocation)
{
    if (allocation->references > 0 || mapped_times(allocation))
        return;
    if (allocation->exported >= 0 && close(allocation->exported))
        fake_complain("the exported descriptor %d was closed too early", allocation->exported);
    if (allocation->exported >= 0 && fake.keeps_fd == 2) { /* another thread takes the number */
        int other = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (other != allocation->exported) {
            dup3(other, allocation->exported, O_CLOEXEC);
            close(other);
        }
    }
    close(allocation->descriptor);
    struct allocation **place = &allocations;
    while (*place != allocation)
        place = &(*place)->next;
    *place = allocation->next;
    free(allocation);
}

static struct allocation *remember(int descriptor, size_t size, int physical, int exportable)
{
    struct allocation *fresh = calloc(1, sizeof *fresh);
    *fresh = (struct allocation){
        .handle = last_handle += 16, .size = size, .descriptor = descriptor, .physical = physical,
        .exportable = exportable, .references = 1, .exported = -1, .imported_from = -1,
        .next = allocations,
    };
    return allocations = fresh;
}

static int new_memory(int physical, size_t size)
{
    char name[64];
    fake_memory_name(physical, name, sizeof name);
    int descriptor = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor >= 0 && ftruncate(descriptor, size)) {
        close(descriptor);
        return -1;
    }
    return descriptor;
}

int memory_create(int ordinal, size_t size, int exportable, uint64_t *handle)
{
    int physical = fake_physical(ordinal);
    if (physical < 0)
        return INVALID_DEVICE;
    if (!size || size % fake.granularity) {
        fake_complain("create of %zu bytes: no multiple of the granularity", size);
        return INVALID_VALUE;
    }
    if (size > fake.total || (fake.books && fake_used_bytes(physical) + size > fake.total))
        return OUT_OF_MEMORY;
    int descriptor = new_memory(physical, size);
    if (descriptor < 0)
        return OUT_OF_MEMORY;
    fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    pthread_mutex_lock(&lock);
    *handle = remember(descriptor, size, physical, exportable)->handle;
    pthread_mutex_unlock(&lock);
    return OK;
}

int memory_export(uint64_t handle, int *descriptor)
{
    pthread_mutex_lock(&lock);
    struct allocation *allocation = find(handle);
    int status = OK;
    if (!allocation) {
        fake_complain("export of %#lx, which is no live handle", (unsigned long)handle);
        status = INVALID_VALUE;
    } else if (!allocation->exportable) {
        fake_complain("export of memory that was created without asking for it");
        status = INVALID_VALUE;
    } else if (allocation->exported >= 0) {
        fake_complain("memory was exported a second time");
        *descriptor = allocation->exported;
    } else {
        *descriptor = dup(allocation->descriptor); /* not close-on-exec: who knows what is real */
        if (fake.keeps_fd)
            allocation->exported = *descriptor;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static int device_behind(int descriptor)
{
    char path[64], target[200], name[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(path, target, sizeof target - 1);
    target[length < 0 ? 0 : length] = 0;
    for (int physical = 0; physical < fake.devices; physical++) {
        fake_memory_name(physical, name, sizeof name);
        if (!strncmp(target, "/memfd:", 7) && !strncmp(target + 7, name, strlen(name)))
            return physical;
    }
    return -1;
}

int memory_import(int descriptor, enum action action, int until_access, uint64_t *handle)
{
    struct stat found;
    int physical = device_behind(descriptor);
    if (physical < 0 || fstat(descriptor, &found))
        return INVALID_VALUE;
    int ours = action == ELSEWHERE ? new_memory(physical, found.st_size)
                                   : fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    pthread_mutex_lock(&lock);
    struct allocation *allocation = remember(ours, found.st_size, physical, 0);
    if (until_access && action != ELSEWHERE)
        allocation->imported_from = descriptor;
    *handle = allocation->handle;
    pthread_mutex_unlock(&lock);
    return OK;
}

int memory_home(uint64_t handle, int *ordinal)
{
    pthread_mutex_lock(&lock);
    struct allocation *allocation = find(handle);
    int status = allocation ? OK : INVALID_VALUE;
    if (allocation) {
        *ordinal = 0;
        while (*ordinal < fake_visible_count() && fake_physical(*ordinal) != allocation->physical)
            ++*ordinal;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int memory_release(uint64_t handle)
{
    pthread_mutex_lock(&lock);
    struct allocation *allocation = find(handle);
    int status = allocation ? OK : INVALID_VALUE;
    if (allocation) {
        allocation->references--;
        forget_unused(allocation);
    } else {
        fake_complain("release of %#lx, which is no live handle", (unsigned long)handle);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int memory_reserve(size_t size, size_t alignment, uint64_t *address)
{
    if (!size || size % fake.granularity || (alignment & (alignment - 1))) {
        fake_complain("reserve of %zu bytes aligned to %zu", size, alignment);
        return INVALID_VALUE;
    }
    if (alignment < 4096)
        alignment = 4096;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *all = mmap(NULL, size + alignment, PROT_NONE, flags, -1, 0);
    if (all == MAP_FAILED)
        return OUT_OF_MEMORY;
    char *start = (char *)(((uintptr_t)all + alignment - 1) & ~(uintptr_t)(alignment - 1));
    if (start > all)
        munmap(all, start - all);
    if (start < all + alignment)
        munmap(start + size, all + alignment - start);
    struct range *range = calloc(1, sizeof *range);
    *range = (struct range){.address = (uintptr_t)start, .size = size};
    pthread_mutex_lock(&lock);
    range->next = ranges;
    ranges = range;
    pthread_mutex_unlock(&lock);
    *address = range->address;
    return OK;
}

int memory_free_address(uint64_t address, size_t size)
{
    pthread_mutex_lock(&lock);
    struct range *range = find_range(address, size);
    int status = range && !range->behind ? OK : INVALID_VALUE;
    if (status) {
        fake_complain("a range of addresses was freed that is %s",
                      range ? "still mapped" : "not reserved");
    } else {
        struct range **place = &ranges;
        while (*place != range)
            place = &(*place)->next;
        *place = range->next;
        munmap((void *)range->address, range->size);
        free(range);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int memory_map(uint64_t address, size_t size, size_t offset, uint64_t handle)
{
    pthread_mutex_lock(&lock);
    struct allocation *allocation = find(handle);
    struct range *range = find_range(address, size);
    int status = INVALID_VALUE;
    if (!allocation || !range || range->behind || offset)
        fake_complain("map of %zu bytes: handle %s, range %s", size, allocation ? "live" : "dead",
                      !range ? "not reserved" : range->behind ? "mapped already" : "free");
    else if (size == allocation->size)
        status = OK;
    if (status == OK) {
        mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->descriptor, 0);
        range->behind = allocation;
        range->flags = 0;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int memory_access(uint64_t address, size_t size, int ordinal, int flags)
{
    pthread_mutex_lock(&lock);
    struct range *range = find_range(address, size);
    struct allocation *behind = range ? range->behind : NULL;
    int status = INVALID_VALUE;
    if (!behind)
        fake_complain("access was set for a range that is not mapped");
    else if (fake_physical(ordinal) != behind->physical)
        fake_complain("access was set for a device that does not hold the memory");
    else if (flags != 1 && flags != 3)
        fake_complain("access was set with the flags %d", flags);
    else if (behind->imported_from < 0 || same_file(behind->imported_from, behind->descriptor))
        status = OK;
    else
        fake_complain("the descriptor was closed between import and setting access");
    if (status == OK) {
        behind->imported_from = -1;
        range->flags = flags;
        mprotect((void *)address, size, flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int memory_unmap(uint64_t address, size_t size)
{
    if (work_is_target(address, size))
        fake_complain("memory was unmapped while copies into it were under way");
    pthread_mutex_lock(&lock);
    struct range *range = find_range(address, size);
    struct allocation *behind = range ? range->behind : NULL;
    if (behind) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        mmap((void *)address, size, PROT_NONE, flags, -1, 0);
        range->behind = NULL;
        range->flags = 0;
        forget_unused(behind);
    } else {
        fake_complain("unmap of a range that is not mapped");
    }
    pthread_mutex_unlock(&lock);
    return behind ? OK : INVALID_VALUE;
}

int memory_is_accessible(uint64_t address, size_t size, int writable)
{
    int found = 0;
    pthread_mutex_lock(&lock);
    for (struct range *range = ranges; range; range = range->next)
        if (range->flags >= (writable ? 3 : 1) && address >= range->address &&
            address + size <= range->address + range->size)
            found = 1;
    pthread_mutex_unlock(&lock);
    return found;
}

int memory_live(const char *kind)
{
    int count = 0;
    pthread_mutex_lock(&lock);
    if (!strcmp(kind, "handles"))
        for (struct allocation *one = allocations; one; one = one->next)
            count++;
    for (struct range *one = ranges; one; one = one->next) {
        count += !strcmp(kind, "reservations");
        count += !strcmp(kind, "mappings") && one->behind;
    }
    pthread_mutex_unlock(&lock);
    return count;
}

/* Also gives back what a scripted refusal made the code under test lose. */
void memory_reset(void)
{
    while (ranges) {
        struct range *next = ranges->next;
        munmap((void *)ranges->address, ranges->size);
        free(ranges);
        ranges = next;
    }
    while (allocations) {
        allocations->references = 0;
        forget_unused(allocations);
    }
}
