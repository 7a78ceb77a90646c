/* The fake NVIDIA driver, against cuda.h. */
#define _GNU_SOURCE
#include "core.h"

#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

const char *fake_visible_variables[] = {"CUDA_VISIBLE_DEVICES", NULL};
int fake_default_version = 12080;

static int retained[MAX_DEVICES];
static __thread int stack[16], depth; /* ordinals of the contexts this thread has pushed */
static int pushed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- errors, devices ------------------------------------------------------------------------ */

#define ENTER(call)                                                                                \
    enum action action = NOTHING;                                                                  \
    int scripted = fake_enter(call, &action);                                                      \
    (void)action;                                                                                  \
    if (scripted)                                                                                  \
        return (CUresult)scripted;                                                                 \
    if (!fake_initialised())                                                                       \
        return CUDA_ERROR_NOT_INITIALIZED

static const struct { int status; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
};

EXPORT CUresult cuGetErrorName(CUresult error, const char **name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == (int)error)
            return *name = errors[i].name, CUDA_SUCCESS;
    return *name = NULL, CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == (int)error)
            return *text = errors[i].text, CUDA_SUCCESS;
    return *text = NULL, CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuInit(unsigned int flags)
{
    int scripted = fake_enter("cuInit", NULL);
    if (scripted || flags)
        return scripted ? (CUresult)scripted : CUDA_ERROR_INVALID_VALUE;
    return fake_initialise();
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    int scripted = fake_enter("cuDriverGetVersion", NULL);
    *version = fake.version;
    return scripted;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    ENTER("cuDeviceGetCount");
    *count = fake_visible_count();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    ENTER("cuDeviceGetName");
    if (fake_physical(device) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, length, "Fake NVIDIA GPU %d%s", fake_physical(device),
             fake.mig ? " MIG 1g.5gb" : "");
    return CUDA_SUCCESS;
}

static void uuid_of(int physical, int slice, unsigned char *bytes)
{
    for (int i = 0; i < 16; i++)
        bytes[i] = 0x10 + i;
    bytes[0] = slice ? 0xa9 : 0xfa;
    bytes[15] = physical;
}

void fake_uuid_text(int physical, char *text)
{
    unsigned char b[16];
    uuid_of(physical, fake.mig, b);
    snprintf(text, 64,
             "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             fake.mig ? "MIG" : "GPU", b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9],
             b[10], b[11], b[12], b[13], b[14], b[15]);
}

static CUresult give_uuid(CUuuid *uuid, CUdevice device, int slice)
{
    if (fake_physical(device) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    uuid_of(fake_physical(device), slice, (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    ENTER("cuDeviceGetUuid_v2");
    return give_uuid(uuid, device, fake.mig);
}

#undef cuDeviceGetUuid /* from CUDA 13 on the plain name means the second version */
EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    ENTER("cuDeviceGetUuid");
    return give_uuid(uuid, device, 0);
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    ENTER("cuDeviceGetPCIBusId");
    if (fake_physical(device) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(text, length, "0000:%02X:00.0", 0x1A + fake_physical(device));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    ENTER("cuDeviceTotalMem_v2");
    *bytes = fake.total;
    return fake_physical(device) < 0 ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    ENTER("cuDeviceGetAttribute");
    if (fake_physical(device) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *value = fake.integrated; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: *value = fake.compute_mode; break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = fake.vmm; break;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        *value = fake.posix_fd;
        break;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
        if (fake.version < 11030) /* an older driver does not know it */
            return CUDA_ERROR_INVALID_VALUE;
        *value = fake.rdma;
        break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* --- memory ---------------------------------------------------------------------------------- */

static int check_properties(const CUmemAllocationProp *wanted)
{
    if (wanted->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE || wanted->win32HandleMetaData ||
        wanted->allocFlags.usage || wanted->allocFlags.compressionType) {
        fake_complain("allocation properties that make no sense");
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (fake_physical(wanted->location.id) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    return fake.vmm ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *wanted,
                                              CUmemAllocationGranularity_flags option)
{
    ENTER("cuMemGetAllocationGranularity");
    *size = option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED ? fake.granularity : 65536;
    return check_properties(wanted);
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                            const CUmemAllocationProp *wanted, unsigned long long flags)
{
    ENTER("cuMemCreate");
    int status = flags ? INVALID_VALUE : check_properties(wanted);
    int exportable = wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (exportable && !fake.posix_fd)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!!wanted->allocFlags.gpuDirectRDMACapable != !!fake.rdma)
        fake_complain("memory was created %s for RDMA", fake.rdma ? "unfit" : "fit");
    uint64_t made = 0;
    if (!status)
        status = memory_create(wanted->location.id, size, exportable, &made);
    *handle = made;
    return status;
}

EXPORT CUresult cuMemExportToShareableHandle(void *descriptor, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type,
                                             unsigned long long flags)
{
    ENTER("cuMemExportToShareableHandle");
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags)
        return CUDA_ERROR_INVALID_VALUE;
    return memory_export(handle, descriptor);
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
                                               void *descriptor, CUmemAllocationHandleType type)
{
    ENTER("cuMemImportFromShareableHandle");
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t made = 0;
    int status = memory_import((int)(uintptr_t)descriptor, action, 0, &made);
    *handle = made;
    return status;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *found,
                                                       CUmemGenericAllocationHandle handle)
{
    ENTER("cuMemGetAllocationPropertiesFromHandle");
    memset(found, 0, sizeof *found);
    found->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    found->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    found->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    return memory_home(handle, &found->location.id);
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER("cuMemRelease");
    return memory_release(handle);
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment,
                                    CUdeviceptr hint, unsigned long long flags)
{
    ENTER("cuMemAddressReserve");
    uint64_t found = 0;
    int status = hint || flags ? INVALID_VALUE : memory_reserve(size, alignment, &found);
    *address = found;
    return status;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    ENTER("cuMemAddressFree");
    return memory_free_address(address, size);
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                         CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    ENTER("cuMemMap");
    return flags ? INVALID_VALUE : memory_map(address, size, offset, handle);
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *wanted,
                               size_t count)
{
    ENTER("cuMemSetAccess");
    if (count != 1 || wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    return memory_access(address, size, wanted->location.id, wanted->flags);
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    ENTER("cuMemUnmap");
    return memory_unmap(address, size);
}

/* --- contexts -------------------------------------------------------------------------------- */

static CUcontext context_of(int ordinal) { return (CUcontext)&retained[ordinal]; }

void vendor_reset(void)
{
    memset(retained, 0, sizeof retained);
    depth = pushed = 0;
}

int vendor_live(const char *kind)
{
    int count = 0;
    if (!strcmp(kind, "contexts"))
        for (int ordinal = 0; ordinal < MAX_DEVICES; ordinal++)
            count += retained[ordinal];
    return !strcmp(kind, "pushed") ? pushed : count;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER("cuDevicePrimaryCtxRetain");
    if (fake_physical(device) < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    retained[device]++;
    pthread_mutex_unlock(&lock);
    *context = context_of(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    ENTER("cuDevicePrimaryCtxRelease_v2");
    pthread_mutex_lock(&lock);
    int held = device >= 0 && device < MAX_DEVICES && retained[device] > 0;
    if (!held)
        fake_complain("a context was released that is not retained");
    else if (!--retained[device] && work_live_on(device))
        fake_complain("a context was destroyed with streams or events in it");
    pthread_mutex_unlock(&lock);
    return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuCtxPushCurrent(CUcontext context)
{
    ENTER("cuCtxPushCurrent_v2");
    int ordinal = (int *)context - retained;
    if (ordinal < 0 || ordinal >= MAX_DEVICES || !retained[ordinal] || depth == 16)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = ordinal;
    __sync_fetch_and_add(&pushed, 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent(CUcontext *context)
{
    ENTER("cuCtxPopCurrent_v2");
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = context_of(stack[--depth]);
    __sync_fetch_and_sub(&pushed, 1);
    return CUDA_SUCCESS;
}

#define ENTER_CURRENT(call)                                                                        \
    ENTER(call);                                                                                   \
    if (!depth || !retained[stack[depth - 1]]) {                                                   \
        fake_complain(call " without a context");                                                  \
        return CUDA_ERROR_INVALID_CONTEXT;                                                         \
    }                                                                                              \
    int current = stack[depth - 1];                                                                \
    (void)current

EXPORT CUresult cuCtxSynchronize(void)
{
    ENTER_CURRENT("cuCtxSynchronize");
    return work_synchronise(current);
}

/* --- work ------------------------------------------------------------------------------------ */

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    ENTER_CURRENT("cuStreamCreate");
    if (flags != CU_STREAM_NON_BLOCKING)
        fake_complain("a stream that waits for the default stream");
    return work_create_stream(current, (void **)stream);
}

EXPORT CUresult cuStreamDestroy(CUstream stream)
{
    ENTER_CURRENT("cuStreamDestroy_v2");
    return work_destroy_stream(stream);
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    ENTER_CURRENT("cuStreamSynchronize");
    return work_synchronise_stream(stream);
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    ENTER_CURRENT("cuEventCreate");
    if (flags != (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING))
        fake_complain("an event that is timed, or spins");
    return work_create_event(current, (void **)event);
}

EXPORT CUresult cuEventDestroy(CUevent event)
{
    ENTER_CURRENT("cuEventDestroy_v2");
    return work_destroy_event(event);
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER_CURRENT("cuEventRecord");
    return work_record(event, stream);
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
    ENTER_CURRENT("cuEventSynchronize");
    return work_synchronise_event(event);
}

EXPORT CUresult cuMemHostAlloc(void **memory, size_t size, unsigned int flags)
{
    ENTER_CURRENT("cuMemHostAlloc");
    return flags ? INVALID_VALUE : work_pin(memory, size);
}

EXPORT CUresult cuMemFreeHost(void *memory)
{
    ENTER_CURRENT("cuMemFreeHost");
    return work_unpin(memory);
}

EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t size,
                                  CUstream stream)
{
    ENTER_CURRENT("cuMemcpyHtoDAsync_v2");
    return work_copy_in(target, source, size, stream);
}

EXPORT CUresult cuMemcpyDtoH(void *target, CUdeviceptr source, size_t size)
{
    ENTER_CURRENT("cuMemcpyDtoH_v2");
    return work_copy_out(target, source, size, action);
}
