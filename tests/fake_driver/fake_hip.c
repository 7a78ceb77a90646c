/* The fake AMD runtime, against hip_runtime_api.h of ROCm 6 or later. */
#define _GNU_SOURCE
#define __HIP_PLATFORM_AMD__
#include "core.h"

#include <hip/hip_runtime_api.h>
#include <stdio.h>
#include <string.h>

const char *fake_visible_variables[] = {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
                                        "CUDA_VISIBLE_DEVICES", NULL};
int fake_default_version = 70125424;

static __thread int current;    /* hipSetDevice */
static __thread int last_error; /* hipGetLastError */

/* A failing call is remembered for the thread, as the real runtime does. */
static hipError_t done(int status)
{
    if (status)
        last_error = status;
    return (hipError_t)status;
}

#define ENTER(call)                                                                                \
    enum action action = NOTHING;                                                                  \
    int scripted = fake_enter(call, &action);                                                      \
    (void)action;                                                                                  \
    if (scripted)                                                                                  \
        return done(scripted);                                                                     \
    if (!fake_initialised())                                                                       \
        return done(NOT_INITIALISED)

/* --- errors, devices ------------------------------------------------------------------------ */

EXPORT hipError_t hipGetLastError(void)
{
    int status = last_error;
    last_error = 0;
    return (hipError_t)status;
}

EXPORT int fake_last_error(void) { return last_error; }

EXPORT const char *hipGetErrorName(hipError_t error)
{
    switch ((int)error) {
    case 0: return "hipSuccess";
    case 1: return "hipErrorInvalidValue";
    case 2: return "hipErrorOutOfMemory";
    case 3: return "hipErrorNotInitialized";
    case 100: return "hipErrorNoDevice";
    case 101: return "hipErrorInvalidDevice";
    case 400: return "hipErrorInvalidHandle";
    case 801: return "hipErrorNotSupported";
    }
    return "hipErrorUnknown";
}

EXPORT const char *hipGetErrorString(hipError_t error)
{
    switch ((int)error) {
    case 0: return "no error";
    case 1: return "invalid argument";
    case 2: return "out of memory";
    case 3: return "initialization error";
    case 100: return "no ROCm-capable device is detected";
    case 101: return "invalid device ordinal";
    case 400: return "invalid resource handle";
    case 801: return "operation not supported";
    }
    return "unknown error";
}

EXPORT hipError_t hipInit(unsigned int flags)
{
    int scripted = fake_enter("hipInit", NULL);
    if (scripted || flags)
        return done(scripted ? scripted : INVALID_VALUE);
    return done(fake_initialise());
}

EXPORT hipError_t hipRuntimeGetVersion(int *version)
{
    ENTER("hipRuntimeGetVersion");
    *version = fake.version;
    return hipSuccess;
}

EXPORT hipError_t hipDriverGetVersion(int *version) { return hipRuntimeGetVersion(version); }

EXPORT hipError_t hipGetDeviceCount(int *count)
{
    ENTER("hipGetDeviceCount");
    *count = fake_visible_count();
    return done(*count ? OK : NO_DEVICE);
}

EXPORT hipError_t hipGetDevice(int *ordinal)
{
    ENTER("hipGetDevice");
    *ordinal = current;
    return hipSuccess;
}

EXPORT hipError_t hipSetDevice(int ordinal)
{
    ENTER("hipSetDevice");
    if (fake_physical(ordinal) < 0)
        return done(INVALID_DEVICE);
    current = ordinal;
    return hipSuccess;
}

EXPORT hipError_t hipDeviceGetName(char *name, int length, hipDevice_t device)
{
    ENTER("hipDeviceGetName");
    if (fake_physical(device) < 0)
        return done(INVALID_DEVICE);
    snprintf(name, length, "Fake AMD GPU %d", fake_physical(device));
    return hipSuccess;
}

void fake_uuid_text(int physical, char *text)
{
    snprintf(text, 64, "GPU-fa4e00000000%04x", physical);
}

EXPORT hipError_t hipDeviceGetUuid(hipUUID *uuid, hipDevice_t device)
{
    ENTER("hipDeviceGetUuid");
    if (fake_physical(device) < 0)
        return done(INVALID_DEVICE);
    char text[64];
    fake_uuid_text(fake_physical(device), text);
    memcpy(uuid->bytes, text + 4, 16); /* the digits themselves are the bytes */
    if (action == WRONG_BYTES)
        memset(uuid->bytes, 0, 16); /* a board without a serial number */
    return hipSuccess;
}

EXPORT hipError_t hipDeviceGetPCIBusId(char *text, int length, int device)
{
    ENTER("hipDeviceGetPCIBusId");
    if (fake_physical(device) < 0)
        return done(INVALID_DEVICE);
    snprintf(text, length, "0000:%02x:00.0", 0xc1 + fake_physical(device));
    return hipSuccess;
}

EXPORT hipError_t hipDeviceTotalMem(size_t *bytes, hipDevice_t device)
{
    ENTER("hipDeviceTotalMem");
    *bytes = fake.total;
    return done(fake_physical(device) < 0 ? INVALID_DEVICE : OK);
}

EXPORT hipError_t hipMemGetInfo(size_t *available, size_t *total)
{
    ENTER("hipMemGetInfo");
    uint64_t used = fake_used_bytes(fake_physical(current));
    *total = fake.total;
    *available = used < fake.total ? fake.total - used : 0;
    return hipSuccess;
}

EXPORT hipError_t hipDeviceGetAttribute(int *value, hipDeviceAttribute_t attribute, int device)
{
    ENTER("hipDeviceGetAttribute");
    if (fake_physical(device) < 0)
        return done(INVALID_DEVICE);
    switch ((int)attribute) {
    case hipDeviceAttributeIntegrated: *value = fake.integrated; break;
    case hipDeviceAttributeComputeMode: *value = fake.compute_mode; break;
    case hipDeviceAttributeVirtualMemoryManagementSupported: *value = fake.vmm; break;
    default: return done(INVALID_VALUE);
    }
    return hipSuccess;
}

/* --- memory ---------------------------------------------------------------------------------- */

/* The runtime checks the location and then uses the thread's device. */
static int check_properties(const hipMemAllocationProp *wanted)
{
    if (wanted->type != hipMemAllocationTypePinned ||
        wanted->location.type != hipMemLocationTypeDevice || wanted->win32HandleMetaData) {
        fake_complain("allocation properties that make no sense");
        return INVALID_VALUE;
    }
    if (fake_physical(wanted->location.id) < 0)
        return INVALID_DEVICE;
    if (wanted->location.id != current)
        fake_complain("device %d was meant while %d is current", wanted->location.id, current);
    return fake.vmm ? OK : NOT_SUPPORTED;
}

EXPORT hipError_t hipMemGetAllocationGranularity(size_t *size, const hipMemAllocationProp *wanted,
                                                 hipMemAllocationGranularity_flags option)
{
    ENTER("hipMemGetAllocationGranularity");
    *size = option == hipMemAllocationGranularityRecommended ? fake.granularity : 4096;
    return done(check_properties(wanted));
}

EXPORT hipError_t hipMemCreate(hipMemGenericAllocationHandle_t *handle, size_t size,
                               const hipMemAllocationProp *wanted, unsigned long long flags)
{
    ENTER("hipMemCreate");
    int status = flags ? INVALID_VALUE : check_properties(wanted);
    int exportable = wanted->requestedHandleType == hipMemHandleTypePosixFileDescriptor;
    if (exportable && !fake.posix_fd)
        return done(NOT_SUPPORTED);
    uint64_t made = 0;
    if (!status)
        status = memory_create(current, size, exportable, &made);
    *handle = (hipMemGenericAllocationHandle_t)made;
    return done(status);
}

EXPORT hipError_t hipMemExportToShareableHandle(void *descriptor,
                                                hipMemGenericAllocationHandle_t handle,
                                                hipMemAllocationHandleType type,
                                                unsigned long long flags)
{
    ENTER("hipMemExportToShareableHandle");
    if (type != hipMemHandleTypePosixFileDescriptor || flags)
        return done(INVALID_VALUE);
    return done(memory_export((uint64_t)handle, descriptor));
}

EXPORT hipError_t hipMemImportFromShareableHandle(hipMemGenericAllocationHandle_t *handle,
                                                  void *descriptor,
                                                  hipMemAllocationHandleType type)
{
    ENTER("hipMemImportFromShareableHandle");
    if (!descriptor || type != hipMemHandleTypePosixFileDescriptor)
        return done(INVALID_VALUE);
    int by_value = fake.fd_by_value >= 0 ? fake.fd_by_value : fake.version >= 70100000;
    /* Given a value where it wants a pointer, the real runtime faults on it as this does. */
    int number = by_value ? (int)(uintptr_t)descriptor : *(int *)descriptor;
    uint64_t made = 0;
    int status = memory_import(number, action, 1, &made);
    *handle = (hipMemGenericAllocationHandle_t)made;
    return done(status);
}

EXPORT hipError_t hipMemGetAllocationPropertiesFromHandle(hipMemAllocationProp *found,
                                                          hipMemGenericAllocationHandle_t handle)
{
    ENTER("hipMemGetAllocationPropertiesFromHandle");
    memset(found, 0, sizeof *found);
    found->type = hipMemAllocationTypePinned;
    found->requestedHandleType = hipMemHandleTypePosixFileDescriptor;
    found->location.type = hipMemLocationTypeDevice;
    return done(memory_home((uint64_t)handle, &found->location.id));
}

EXPORT hipError_t hipMemRelease(hipMemGenericAllocationHandle_t handle)
{
    ENTER("hipMemRelease");
    return done(memory_release((uint64_t)handle));
}

EXPORT hipError_t hipMemAddressReserve(void **address, size_t size, size_t alignment, void *hint,
                                       unsigned long long flags)
{
    ENTER("hipMemAddressReserve");
    uint64_t found = 0;
    int status = hint || flags ? INVALID_VALUE : memory_reserve(size, alignment, &found);
    *address = (void *)found;
    return done(status);
}

EXPORT hipError_t hipMemAddressFree(void *address, size_t size)
{
    ENTER("hipMemAddressFree");
    return done(memory_free_address((uint64_t)address, size));
}

EXPORT hipError_t hipMemMap(void *address, size_t size, size_t offset,
                            hipMemGenericAllocationHandle_t handle, unsigned long long flags)
{
    ENTER("hipMemMap");
    return done(flags ? INVALID_VALUE
                      : memory_map((uint64_t)address, size, offset, (uint64_t)handle));
}

EXPORT hipError_t hipMemSetAccess(void *address, size_t size, const hipMemAccessDesc *wanted,
                                  size_t count)
{
    ENTER("hipMemSetAccess");
    if (count != 1 || wanted->location.type != hipMemLocationTypeDevice)
        return done(INVALID_VALUE);
    return done(memory_access((uint64_t)address, size, wanted->location.id, wanted->flags));
}

EXPORT hipError_t hipMemUnmap(void *address, size_t size)
{
    ENTER("hipMemUnmap");
    return done(memory_unmap((uint64_t)address, size));
}

void vendor_reset(void) { current = last_error = 0; }

int vendor_live(const char *kind)
{
    (void)kind;
    return 0;
}

/* --- work ------------------------------------------------------------------------------------ */

EXPORT hipError_t hipDeviceSynchronize(void)
{
    ENTER("hipDeviceSynchronize");
    return done(work_synchronise(current));
}

EXPORT hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned int flags)
{
    ENTER("hipStreamCreateWithFlags");
    if (flags != hipStreamNonBlocking)
        fake_complain("a stream that waits for the default stream");
    return done(work_create_stream(current, (void **)stream));
}

EXPORT hipError_t hipStreamDestroy(hipStream_t stream)
{
    ENTER("hipStreamDestroy");
    return done(work_destroy_stream(stream));
}

EXPORT hipError_t hipStreamSynchronize(hipStream_t stream)
{
    ENTER("hipStreamSynchronize");
    return done(work_synchronise_stream(stream));
}

EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags)
{
    ENTER("hipEventCreateWithFlags");
    if (flags != (hipEventBlockingSync | hipEventDisableTiming))
        fake_complain("an event that is timed, or spins");
    return done(work_create_event(current, (void **)event));
}

EXPORT hipError_t hipEventDestroy(hipEvent_t event)
{
    ENTER("hipEventDestroy");
    return done(work_destroy_event(event));
}

EXPORT hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream)
{
    ENTER("hipEventRecord");
    return done(work_record(event, stream));
}

EXPORT hipError_t hipEventSynchronize(hipEvent_t event)
{
    ENTER("hipEventSynchronize");
    return done(work_synchronise_event(event));
}

EXPORT hipError_t hipHostMalloc(void **memory, size_t size, unsigned int flags)
{
    ENTER("hipHostMalloc");
    return done(flags ? INVALID_VALUE : work_pin(memory, size));
}

EXPORT hipError_t hipHostFree(void *memory)
{
    ENTER("hipHostFree");
    return done(work_unpin(memory));
}

EXPORT hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t target, const void *source, size_t size,
                                     hipStream_t stream)
{
    ENTER("hipMemcpyHtoDAsync");
    return done(work_copy_in((uint64_t)target, source, size, stream));
}

EXPORT hipError_t hipMemcpyDtoH(void *target, hipDeviceptr_t source, size_t size)
{
    ENTER("hipMemcpyDtoH");
    return done(work_copy_out(target, (uint64_t)source, size, action));
}
