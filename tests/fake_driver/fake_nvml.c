/* The little of NVIDIA's management library that is used. By hand: six functions, one structure
 * (nvml.h: nvmlMemory_t is total, free, used). */
#include "core.h"

#include <string.h>

enum { NVML_UNINITIALISED = 1, NVML_NOT_FOUND = 6 };

static int nvml_started;

EXPORT int nvmlInit_v2(void)
{
    int scripted = fake_enter("nvmlInit_v2", NULL);
    nvml_started |= !scripted;
    return scripted;
}

EXPORT const char *nvmlErrorString(int status)
{
    return status == NVML_NOT_FOUND ? "Not Found"
           : status == NVML_UNINITIALISED ? "Uninitialized" : "Unknown Error";
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    int scripted = fake_enter("nvmlDeviceGetHandleByUUID", NULL);
    if (scripted || !nvml_started)
        return scripted ? scripted : NVML_UNINITIALISED;
    for (int physical = 0; physical < fake.devices; physical++) {
        char text[64];
        fake_uuid_text(physical, text);
        if (!strcmp(text, uuid))
            return *device = (void *)(uintptr_t)(physical + 1), 0;
    }
    return NVML_NOT_FOUND;
}

EXPORT int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used)
{
    int scripted = fake_enter("nvmlDeviceGetMemoryInfo", NULL);
    if (scripted)
        return scripted;
    uint64_t used = fake_used_bytes((int)(uintptr_t)device - 1);
    total_free_used[0] = fake.total;
    total_free_used[1] = used < fake.total ? fake.total - used : 0;
    total_free_used[2] = used;
    return 0;
}
