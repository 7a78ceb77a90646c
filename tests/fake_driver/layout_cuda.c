/* What the tests compare with our own ctypes: sizes, offsets and constants of cuda.h. */
#include "core.h"

#include <cuda.h>
#include <string.h>

#if CUDA_VERSION < 11040
#error "cuda.h is older than CUDA 11.4"
#endif

_Static_assert((int)CUDA_ERROR_INVALID_VALUE == INVALID_VALUE, "status");
_Static_assert((int)CUDA_ERROR_OUT_OF_MEMORY == OUT_OF_MEMORY, "status");
_Static_assert((int)CUDA_ERROR_NOT_INITIALIZED == NOT_INITIALISED, "status");
_Static_assert((int)CUDA_ERROR_NO_DEVICE == NO_DEVICE, "status");
_Static_assert((int)CUDA_ERROR_INVALID_DEVICE == INVALID_DEVICE, "status");
_Static_assert((int)CUDA_ERROR_INVALID_CONTEXT == INVALID_CONTEXT, "status");
_Static_assert((int)CUDA_ERROR_INVALID_HANDLE == INVALID_HANDLE, "status");
_Static_assert((int)CUDA_ERROR_NOT_SUPPORTED == NOT_SUPPORTED, "status");

#define FIELD(type, field) {#type "." #field, offsetof(type, field)}
#define VALUE(name) {#name, name}

EXPORT long fake_layout(const char *name)
{
    static const struct { const char *name; long value; } known[] = {
        {"CUmemAllocationProp", sizeof(CUmemAllocationProp)},
        FIELD(CUmemAllocationProp, type),
        FIELD(CUmemAllocationProp, requestedHandleTypes),
        FIELD(CUmemAllocationProp, location.type),
        FIELD(CUmemAllocationProp, location.id),
        FIELD(CUmemAllocationProp, win32HandleMetaData),
        FIELD(CUmemAllocationProp, allocFlags.compressionType),
        FIELD(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable),
        FIELD(CUmemAllocationProp, allocFlags.usage),
        {"CUmemAccessDesc", sizeof(CUmemAccessDesc)},
        FIELD(CUmemAccessDesc, location.type),
        FIELD(CUmemAccessDesc, location.id),
        FIELD(CUmemAccessDesc, flags),
        VALUE(CU_MEM_ALLOCATION_TYPE_PINNED),
        VALUE(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        VALUE(CU_MEM_LOCATION_TYPE_DEVICE),
        VALUE(CU_MEM_ACCESS_FLAGS_PROT_READ),
        VALUE(CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
        VALUE(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        VALUE(CU_STREAM_NON_BLOCKING),
        VALUE(CU_EVENT_BLOCKING_SYNC),
        VALUE(CU_EVENT_DISABLE_TIMING),
        VALUE(CU_COMPUTEMODE_DEFAULT),
        VALUE(CU_COMPUTEMODE_PROHIBITED),
        VALUE(CU_COMPUTEMODE_EXCLUSIVE_PROCESS),
        VALUE(CU_DEVICE_ATTRIBUTE_INTEGRATED),
        VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE),
        VALUE(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
        VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
        VALUE(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, name))
            return known[i].value;
    return -1;
}
