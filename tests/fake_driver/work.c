/* Streams, events and pinned memory. A copy happens when somebody waits for it, not before: code
 * that reuses a staging buffer or seals a slab too early gets the wrong bytes every time. */
#define _GNU_SOURCE
#include "core.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct copy {
    uint64_t target;
    const void *source;
    size_t size;
    uint64_t number;
    struct copy *next;
};

struct stream {
    int ordinal;
    struct copy *first, *last;
    struct stream *next;
};

struct event {
    int ordinal;
    struct stream *stream;
    uint64_t number;
    struct event *next;
};

struct pinned {
    char *memory;
    size_t size;
    struct pinned *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *streams;
static struct event *events;
static struct pinned *pinned;
static uint64_t last_number;

static struct stream *find_stream(const void *stream)
{
    struct stream *found = streams;
    while (found && found != stream)
        found = found->next;
    return found;
}

static struct event *find_event(const void *event)
{
    struct event *found = events;
    while (found && found != event)
        found = found->next;
    return found;
}

static void run_until(struct stream *stream, uint64_t number)
{
    while (stream->first && stream->first->number <= number) {
        struct copy *copy = stream->first;
        if (memory_is_accessible(copy->target, copy->size, 1))
            memcpy((void *)copy->target, copy->source, copy->size);
        else
            fake_complain("a copy's target was gone when the copy ran");
        stream->first = copy->next;
        free(copy);
    }
}

int work_pin(void **memory, size_t size)
{
    if (!size) {
        fake_complain("0 bytes were pinned");
        return INVALID_VALUE;
    }
    struct pinned *fresh = calloc(1, sizeof *fresh);
    fresh->memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fresh->size = size;
    pthread_mutex_lock(&lock);
    fresh->next = pinned;
    pinned = fresh;
    pthread_mutex_unlock(&lock);
    *memory = fresh->memory;
    return OK;
}

static int is_source(const struct pinned *area)
{
    for (struct stream *stream = streams; stream; stream = stream->next)
        for (struct copy *copy = stream->first; copy; copy = copy->next)
            if ((char *)copy->source >= area->memory &&
                (char *)copy->source < area->memory + area->size)
                return 1;
    return 0;
}

int work_unpin(void *memory)
{
    pthread_mutex_lock(&lock);
    struct pinned **place = &pinned;
    while (*place && (*place)->memory != memory)
        place = &(*place)->next;
    struct pinned *area = *place;
    if (!area) {
        fake_complain("memory was unpinned that is not pinned");
    } else {
        if (is_source(area))
            fake_complain("memory was unpinned while copies from it were under way");
        *place = area->next;
        munmap(area->memory, area->size);
        free(area);
    }
    pthread_mutex_unlock(&lock);
    return area ? OK : INVALID_VALUE;
}

int work_create_stream(int ordinal, void **stream)
{
    struct stream *fresh = calloc(1, sizeof *fresh);
    pthread_mutex_lock(&lock);
    *fresh = (struct stream){.ordinal = ordinal, .next = streams};
    streams = fresh;
    pthread_mutex_unlock(&lock);
    *stream = fresh;
    return OK;
}

int work_destroy_stream(void *stream)
{
    pthread_mutex_lock(&lock);
    struct stream *found = find_stream(stream);
    if (!found) {
        fake_complain("a stream was destroyed that is none");
    } else {
        if (found->first)
            fake_complain("a stream was destroyed with copies under way");
        run_until(found, UINT64_MAX);
        struct stream **place = &streams;
        while (*place != found)
            place = &(*place)->next;
        *place = found->next;
        free(found);
    }
    pthread_mutex_unlock(&lock);
    return found ? OK : INVALID_HANDLE;
}

int work_synchronise_stream(void *stream)
{
    pthread_mutex_lock(&lock);
    struct stream *found = find_stream(stream);
    if (found)
        run_until(found, UINT64_MAX);
    else
        fake_complain("a stream was waited for that is none");
    pthread_mutex_unlock(&lock);
    return found ? OK : INVALID_HANDLE;
}

int work_create_event(int ordinal, void **event)
{
    struct event *fresh = calloc(1, sizeof *fresh);
    pthread_mutex_lock(&lock);
    *fresh = (struct event){.ordinal = ordinal, .next = events};
    events = fresh;
    pthread_mutex_unlock(&lock);
    *event = fresh;
    return OK;
}

int work_destroy_event(void *event)
{
    pthread_mutex_lock(&lock);
    struct event *found = find_event(event);
    if (!found) {
        fake_complain("an event was destroyed that is none");
    } else {
        struct event **place = &events;
        while (*place != found)
            place = &(*place)->next;
        *place = found->next;
        free(found);
    }
    pthread_mutex_unlock(&lock);
    return found ? OK : INVALID_HANDLE;
}

int work_record(void *event, void *stream)
{
    pthread_mutex_lock(&lock);
    struct event *found = find_event(event);
    struct stream *place = find_stream(stream);
    if (found && place) {
        found->stream = place;
        found->number = last_number;
    } else {
        fake_complain("an event was recorded, but event or stream is none");
    }
    pthread_mutex_unlock(&lock);
    return found && place ? OK : INVALID_HANDLE;
}

int work_synchronise_event(void *event)
{
    pthread_mutex_lock(&lock);
    struct event *found = find_event(event);
    if (!found)
        fake_complain("an event was waited for that is none");
    else if (found->stream && find_stream(found->stream))
        run_until(found->stream, found->number);
    pthread_mutex_unlock(&lock);
    return found ? OK : INVALID_HANDLE;
}

int work_synchronise(int ordinal)
{
    pthread_mutex_lock(&lock);
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->ordinal == ordinal)
            run_until(stream, UINT64_MAX);
    pthread_mutex_unlock(&lock);
    return OK;
}

static int is_pinned(const char *memory, size_t size)
{
    for (struct pinned *area = pinned; area; area = area->next)
        if (memory >= area->memory && memory + size <= area->memory + area->size)
            return 1;
    return 0;
}

int work_copy_in(uint64_t target, const void *source, size_t size, void *stream)
{
    if (!size || !memory_is_accessible(target, size, 1)) {
        fake_complain("a copy of %zu bytes to addresses that are not mapped writable", size);
        return INVALID_VALUE;
    }
    struct copy *copy = calloc(1, sizeof *copy);
    pthread_mutex_lock(&lock);
    struct stream *found = find_stream(stream);
    int status = found && is_pinned(source, size) ? OK : INVALID_VALUE;
    if (status == OK) {
        *copy = (struct copy){target, source, size, ++last_number, NULL};
        if (found->first)
            found->last->next = copy;
        else
            found->first = copy;
        found->last = copy;
    } else {
        fake_complain("a copy from memory that is not pinned, or on a stream that is none");
        free(copy);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int work_copy_out(void *target, uint64_t source, size_t size, enum action action)
{
    if (!memory_is_accessible(source, size, 0)) {
        fake_complain("a copy of %zu bytes from addresses that are not mapped", size);
        return INVALID_VALUE;
    }
    memcpy(target, (void *)source, size);
    if (action == WRONG_BYTES && size)
        ((char *)target)[size / 2] ^= 0x40;
    return OK;
}

int work_is_target(uint64_t address, size_t size)
{
    int found = 0;
    pthread_mutex_lock(&lock);
    for (struct stream *stream = streams; stream; stream = stream->next)
        for (struct copy *copy = stream->first; copy; copy = copy->next)
            found |= copy->target >= address && copy->target < address + size;
    pthread_mutex_unlock(&lock);
    return found;
}

int work_live(const char *kind)
{
    int count = 0;
    pthread_mutex_lock(&lock);
    for (struct stream *one = streams; one; one = one->next) {
        count += !strcmp(kind, "streams");
        for (struct copy *copy = one->first; copy; copy = copy->next)
            count += !strcmp(kind, "copies");
    }
    for (struct event *one = events; one; one = one->next)
        count += !strcmp(kind, "events");
    for (struct pinned *one = pinned; one; one = one->next)
        count += !strcmp(kind, "pinned");
    pthread_mutex_unlock(&lock);
    return count;
}

int work_live_on(int ordinal)
{
    int count = 0;
    pthread_mutex_lock(&lock);
    for (struct stream *one = streams; one; one = one->next)
        count += one->ordinal == ordinal;
    for (struct event *one = events; one; one = one->next)
        count += one->ordinal == ordinal;
    pthread_mutex_unlock(&lock);
    return count;
}

void work_reset(void)
{
    while (streams) {
        struct stream *next = streams->next;
        for (struct copy *copy = streams->first; copy;) {
            struct copy *after = copy->next;
            free(copy);
            copy = after;
        }
        free(streams);
        streams = next;
    }
    while (events) {
        struct event *next = events->next;
        free(events);
        events = next;
    }
    while (pinned) {
        struct pinned *next = pinned->next;
        munmap(pinned->memory, pinned->size);
        free(pinned);
        pinned = next;
    }
}
