/* What the tests compare with our own ctypes: sizes, offsets and constants of hip_runtime_api.h. */
#define __HIP_PLATFORM_AMD__
#include "core.h"

#include <hip/hip_runtime_api.h>
#include <string.h>

#if HIP_VERSION_MAJOR < 6
#error "hip_runtime_api.h is older than ROCm 6: hipMemAllocationProp had another layout then"
#endif

_Static_assert((int)hipErrorInvalidValue == INVALID_VALUE, "status");
_Static_assert((int)hipErrorOutOfMemory == OUT_OF_MEMORY, "status");
_Static_assert((int)hipErrorNotInitialized == NOT_INITIALISED, "status");
_Static_assert((int)hipErrorNoDevice == NO_DEVICE, "status");
_Static_assert((int)hipErrorInvalidDevice == INVALID_DEVICE, "status");
_Static_assert((int)hipErrorInvalidContext == INVALID_CONTEXT, "status");
_Static_assert((int)hipErrorInvalidHandle == INVALID_HANDLE, "status");
_Static_assert((int)hipErrorNotSupported == NOT_SUPPORTED, "status");

#define FIELD(type, field) {#type "." #field, offsetof(type, field)}
#define VALUE(name) {#name, name}

EXPORT long fake_layout(const char *name)
{
    static const struct { const char *name; long value; } known[] = {
        {"hipMemAllocationProp", sizeof(hipMemAllocationProp)},
        FIELD(hipMemAllocationProp, type),
        FIELD(hipMemAllocationProp, requestedHandleType),
        FIELD(hipMemAllocationProp, location.type),
        FIELD(hipMemAllocationProp, location.id),
        FIELD(hipMemAllocationProp, win32HandleMetaData),
        FIELD(hipMemAllocationProp, allocFlags.compressionType),
        FIELD(hipMemAllocationProp, allocFlags.gpuDirectRDMACapable),
        FIELD(hipMemAllocationProp, allocFlags.usage),
        {"hipMemAccessDesc", sizeof(hipMemAccessDesc)},
        FIELD(hipMemAccessDesc, location.type),
        FIELD(hipMemAccessDesc, location.id),
        FIELD(hipMemAccessDesc, flags),
        VALUE(hipMemAllocationTypePinned),
        VALUE(hipMemHandleTypePosixFileDescriptor),
        VALUE(hipMemLocationTypeDevice),
        VALUE(hipMemAccessFlagsProtRead),
        VALUE(hipMemAccessFlagsProtReadWrite),
        VALUE(hipMemAllocationGranularityRecommended),
        VALUE(hipStreamNonBlocking),
        VALUE(hipEventBlockingSync),
        VALUE(hipEventDisableTiming),
        VALUE(hipComputeModeDefault),
        VALUE(hipComputeModeProhibited),
        VALUE(hipComputeModeExclusiveProcess),
        VALUE(hipDeviceAttributeIntegrated),
        VALUE(hipDeviceAttributeComputeMode),
        VALUE(hipDeviceAttributeVirtualMemoryManagementSupported),
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, name))
            return known[i].value;
    return -1;
}
