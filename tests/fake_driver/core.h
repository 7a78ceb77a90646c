/* The vendor-neutral half of the fake GPU drivers.
 *
 * Device memory is memfds, device addresses are host addresses, streams are lists of copies that
 * happen as late as the real thing may let them. Misuse that a real driver would punish with a
 * crash or wrong bytes is written down as a complaint. fake_cuda.c and fake_hip.c give this the
 * vendors' names, types and checks; see README.md beside this file for what can be scripted.
 */
#ifndef FAKE_DRIVER_CORE_H
#define FAKE_DRIVER_CORE_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* The values that CUDA's and HIP's enums share; both vendors' files assert them. */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALISED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_SUPPORTED = 801,
};

enum action { NOTHING, ELSEWHERE, WRONG_BYTES };

enum { MAX_DEVICES = 16 };

struct settings {
    int devices;
    uint64_t total, granularity;
    int vmm, posix_fd, compute_mode, integrated, rdma, mig, version;
    int books;       /* refuse to create more than `total` bytes on the machine (looks at /proc) */
    int fd_by_value; /* HIP: how import takes its descriptor; -1: as the version does */
    int keeps_fd;   /* HIP: the exported descriptor is closed with the handle */
};

extern const char *fake_visible_variables[]; /* of this vendor, NULL at the end */
extern const char *fake_handle_prefix;       /* "GPU-" and so on, for visibility by UUID */
extern int fake_default_version;
void fake_uuid_text(int physical, char *text); /* at most 63 characters */

extern struct settings fake;

/* Counts a call and carries out what is scripted for it: a status, or a hang, or a crash. */
int fake_enter(const char *call, enum action *action);
void fake_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

int fake_initialise(void);
int fake_initialised(void);
int fake_visible_count(void);
int fake_physical(int ordinal); /* -1: no such device */
uint64_t fake_used_bytes(int physical);
void fake_memory_name(int physical, char *name, size_t size);

/* memory.c */
int memory_create(int ordinal, size_t size, int exportable, uint64_t *handle);
int memory_export(uint64_t handle, int *descriptor);
int memory_import(int descriptor, enum action action, int until_access, uint64_t *handle);
int memory_home(uint64_t handle, int *ordinal);
int memory_release(uint64_t handle);
int memory_reserve(size_t size, size_t alignment, uint64_t *address);
int memory_free_address(uint64_t address, size_t size);
int memory_map(uint64_t address, size_t size, size_t offset, uint64_t handle);
int memory_access(uint64_t address, size_t size, int ordinal, int flags);
int memory_unmap(uint64_t address, size_t size);
int memory_is_accessible(uint64_t address, size_t size, int writable);
int memory_live(const char *kind);
void memory_reset(void);

/* work.c: streams, events and pinned memory of the device `ordinal` */
int work_pin(void **memory, size_t size);
int work_unpin(void *memory);
int work_create_stream(int ordinal, void **stream);
int work_destroy_stream(void *stream);
int work_synchronise_stream(void *stream);
int work_create_event(int ordinal, void **event);
int work_destroy_event(void *event);
int work_record(void *event, void *stream);
int work_synchronise_event(void *event);
int work_synchronise(int ordinal);
int work_copy_in(uint64_t target, const void *source, size_t size, void *stream);
int work_copy_out(void *target, uint64_t source, size_t size, enum action action);
int work_is_target(uint64_t address, size_t size); /* copies into it are under way */
int work_live(const char *kind);
int work_live_on(int ordinal);
void work_reset(void);

int vendor_live(const char *kind); /* "contexts", "pushed" */
void vendor_reset(void);

#endif
