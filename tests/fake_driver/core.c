#define _GNU_SOURCE
#include "core.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct settings fake;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int configured, initialised;
static char complaints[16384];
static struct { char name[64]; int count; } calls[128];
static struct { char name[64]; int first, last; char what[16]; } faults[32];
static int call_kinds, fault_count;
static int visible[MAX_DEVICES], visible_count;

/* --- settings and faults ------------------------------------------------------------------- */

static uint64_t size_of(const char *text)
{
    char *end;
    uint64_t value = strtoull(text, &end, 10);
    switch (*end) {
    case 'K': return value << 10;
    case 'M': return value << 20;
    case 'G': return value << 30;
    }
    return value;
}

static void set(const char *name, const char *value)
{
    struct { const char *name; int *place; } integers[] = {
        {"devices", &fake.devices}, {"vmm", &fake.vmm}, {"posix_fd", &fake.posix_fd},
        {"compute_mode", &fake.compute_mode}, {"integrated", &fake.integrated},
        {"rdma", &fake.rdma}, {"mig", &fake.mig}, {"version", &fake.version},
        {"books", &fake.books}, {"fd_by_value", &fake.fd_by_value}, {"keeps_fd", &fake.keeps_fd},
    };
    for (size_t i = 0; i < sizeof integers / sizeof *integers; i++)
        if (!strcmp(name, integers[i].name)) {
            *integers[i].place = atoi(value);
            return;
        }
    if (!strcmp(name, "total"))
        fake.total = size_of(value);
    else if (!strcmp(name, "granularity"))
        fake.granularity = size_of(value);
    else
        fake_complain("the setting %s is unknown", name);
}

static void configure(const char *text)
{
    char *copy = strdup(text), *state = NULL;
    for (char *word = strtok_r(copy, " ", &state); word; word = strtok_r(NULL, " ", &state)) {
        char *equals = strchr(word, '=');
        if (!equals)
            continue;
        *equals = 0;
        set(word, equals + 1);
    }
    free(copy);
}

/* "cuMemCreate:1-3=2 cuMemMap:2=hang": the first to third call fail with 2, the second hangs.
 * Without a range every call is meant. */
static void script(const char *text)
{
    char *copy = strdup(text), *state = NULL;
    fault_count = 0;
    for (char *word = strtok_r(copy, " ", &state); word; word = strtok_r(NULL, " ", &state)) {
        char *equals = strchr(word, '='), *range = strchr(word, ':');
        if (!equals || fault_count == 32)
            continue;
        *equals = 0;
        int first = 1, last = 1 << 30;
        if (range) {
            *range = 0;
            char *dash = strchr(range + 1, '-');
            first = atoi(range + 1);
            last = dash ? atoi(dash + 1) : first;
        }
        snprintf(faults[fault_count].name, 64, "%s", word);
        snprintf(faults[fault_count].what, 16, "%s", equals + 1);
        faults[fault_count].first = first;
        faults[fault_count++].last = last;
    }
    free(copy);
}

static void configure_once(void)
{
    if (configured)
        return;
    configured = 1;
    fake = (struct settings){
        .devices = 1, .total = 4ULL << 30, .granularity = 2 << 20, .vmm = 1, .posix_fd = 1,
        .version = fake_default_version, .fd_by_value = -1,
    };
    if (getenv("FAKE_DRIVER"))
        configure(getenv("FAKE_DRIVER"));
    if (getenv("FAKE_DRIVER_FAULTS"))
        script(getenv("FAKE_DRIVER_FAULTS"));
}

int fake_enter(const char *call, enum action *action)
{
    pthread_mutex_lock(&lock);
    configure_once();
    int kind = 0, status = OK;
    while (kind < call_kinds && strcmp(calls[kind].name, call))
        kind++;
    if (kind == call_kinds)
        snprintf(calls[call_kinds++].name, 64, "%s", call);
    int number = ++calls[kind].count;
    const char *what = "";
    for (int i = 0; i < fault_count; i++)
        if (!strcmp(faults[i].name, call) && number >= faults[i].first && number <= faults[i].last)
            what = faults[i].what;
    pthread_mutex_unlock(&lock);
    if (!strcmp(what, "hang"))
        for (;;)
            pause();
    if (!strcmp(what, "crash"))
        abort();
    if (!strcmp(what, "elsewhere") && action)
        *action = ELSEWHERE;
    else if (!strcmp(what, "wrong") && action)
        *action = WRONG_BYTES;
    else if (*what)
        status = atoi(what);
    return status;
}

/* --- complaints ----------------------------------------------------------------------------- */

static void note(const char *line)
{
    const char *path = getenv("FAKE_DRIVER_LOG");
    int log = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (log >= 0) {
        dprintf(log, "%s\n", line);
        close(log);
    }
}

void fake_complain(const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    size_t used = strlen(complaints);
    snprintf(complaints + used, sizeof complaints - used, "%s\n", line);
    note(line);
}

static int live(const char *kind)
{
    return memory_live(kind) + work_live(kind) + vendor_live(kind);
}

static const char *kinds[] = {"handles", "reservations", "mappings", "streams", "events",
                              "pinned", "copies", "contexts", "pushed"};

__attribute__((destructor)) EXPORT void fake_report(void)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (live(kinds[i])) {
            char line[96];
            snprintf(line, sizeof line, "left at exit: %d %s", live(kinds[i]), kinds[i]);
            note(line);
        }
}

/* --- for the tests -------------------------------------------------------------------------- */

/* Forget everything and start over with these settings and faults ("" for none). */
EXPORT void fake_reset(const char *settings, const char *faulty)
{
    vendor_reset();
    work_reset();
    memory_reset();
    pthread_mutex_lock(&lock);
    configured = initialised = visible_count = call_kinds = fault_count = 0;
    memset(calls, 0, sizeof calls);
    complaints[0] = 0;
    configure_once();
    configure(settings);
    script(faulty);
    pthread_mutex_unlock(&lock);
}

EXPORT void fake_script(const char *faulty)
{
    pthread_mutex_lock(&lock);
    memset(calls, 0, sizeof calls);
    call_kinds = 0;
    script(faulty);
    pthread_mutex_unlock(&lock);
}

EXPORT const char *fake_complaints(void) { return complaints; }

EXPORT int fake_live(const char *kind) { return live(kind); }

EXPORT int fake_calls(const char *call)
{
    for (int i = 0; i < call_kinds; i++)
        if (!strcmp(calls[i].name, call))
            return calls[i].count;
    return 0;
}

/* --- devices -------------------------------------------------------------------------------- */

static int device_named(const char *word)
{
    char *end;
    long index = strtol(word, &end, 10);
    if (*word && !*end)
        return index >= 0 && index < fake.devices ? (int)index : -1;
    for (int physical = 0; physical < fake.devices; physical++) {
        char uuid[64];
        fake_uuid_text(physical, uuid);
        if (strlen(word) > 4 && !strncmp(uuid, word, strlen(word)))
            return physical;
    }
    return -1;
}

/* What the vendors' variables show, in their order; a wrong entry hides all that follow. */
static void look_for_devices(void)
{
    visible_count = 0;
    for (int physical = 0; physical < fake.devices && physical < MAX_DEVICES; physical++)
        visible[visible_count++] = physical;
    for (const char **name = fake_visible_variables; *name; name++) {
        if (!getenv(*name))
            continue;
        char *copy = strdup(getenv(*name)), *state = NULL;
        visible_count = 0;
        for (char *word = strtok_r(copy, ",", &state); word; word = strtok_r(NULL, ",", &state)) {
            int physical = device_named(word);
            if (physical < 0 || visible_count == MAX_DEVICES)
                break;
            visible[visible_count++] = physical;
        }
        free(copy);
        return;
    }
}

int fake_initialise(void)
{
    look_for_devices();
    initialised = 1;
    return visible_count ? OK : NO_DEVICE;
}

int fake_initialised(void) { return initialised; }

int fake_visible_count(void) { return visible_count; }

int fake_physical(int ordinal)
{
    return ordinal >= 0 && ordinal < visible_count ? visible[ordinal] : -1;
}

/* The name of the memfds that are a device's memory; FAKE_DRIVER_NODE keeps tests that run at the
 * same time apart. */
void fake_memory_name(int physical, char *name, size_t size)
{
    const char *node = getenv("FAKE_DRIVER_NODE");
    snprintf(name, size, "fake-vram-%s-%d!", node ? node : "", physical);
}

/* Every process's memfds with the device's name, each counted once: right also after a SIGKILL.
 * Mapped memory counts because its handle keeps a descriptor open. Not from several threads. */
uint64_t fake_used_bytes(int physical)
{
    static ino_t seen[8192];
    int count = 0;
    uint64_t used = 0;
    char wanted[80] = "/memfd:", path[600], target[200];
    fake_memory_name(physical, wanted + 7, sizeof wanted - 7);
    DIR *processes = opendir("/proc");
    for (struct dirent *process; processes && (process = readdir(processes));) {
        if (atoi(process->d_name) <= 0)
            continue;
        char folder[300];
        snprintf(folder, sizeof folder, "/proc/%s/fd", process->d_name);
        DIR *entries = opendir(folder);
        for (struct dirent *entry; entries && (entry = readdir(entries));) {
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
            ssize_t length = readlink(path, target, sizeof target - 1);
            if (length < 0)
                continue;
            target[length] = 0;
            struct stat found;
            if (strncmp(target, wanted, strlen(wanted)) || stat(path, &found))
                continue;
            int known = 0;
            for (int i = 0; i < count; i++)
                known |= seen[i] == found.st_ino;
            if (known || count == 8192)
                continue;
            seen[count++] = found.st_ino;
            used += found.st_size;
        }
        if (entries)
            closedir(entries);
    }
    if (processes)
        closedir(processes);
    return used;
}
