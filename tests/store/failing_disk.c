/* A disk that fails, for the process that is started with LD_PRELOAD: reads and writes of one file fail, or the
 * whole directory turns read-only as soon as one of its files is to be changed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int mode; /* 1: EIO on the files that match, 2: read-only from the first change of one that matches */
static int read_only;
static int paused;
static char directory[PATH_MAX];
static char pattern[256];

void failing_disk(int wanted, const char *where, const char *names) {
    mode = wanted;
    read_only = 0;
    strncpy(directory, where, sizeof directory - 1);
    strncpy(pattern, names, sizeof pattern - 1);
}

/* The test itself looks at the files. */
void failing_disk_pause(int pause) { paused = pause; }

#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int in_directory(const char *path) {
    size_t length = strlen(directory);
    return !strncmp(path, directory, length) && (path[length] == '/' || path[length] == 0);
}

static int matches(const char *path) {
    size_t length = strlen(directory);
    /* Not what lies in a directory below: links to the file, and copies of it. */
    return !paused && in_directory(path) && path[length] == '/' && !strchr(path + length + 1, '/')
        && !fnmatch(pattern, path + length + 1, 0);
}

static int of_descriptor(int descriptor, char *path) {
    char link[64];
    ssize_t length;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    char *deleted = strstr(path, " (deleted)");
    if (deleted) *deleted = 0;
    return 1;
}

/* Nonzero, with errno set, when it fails. */
static int use(const char *path) {
    if (mode == 1 && matches(path)) { errno = EIO; return 1; }
    return 0;
}

static int change(const char *path) {
    if (use(path)) return 1;
    if (mode == 2) {
        if (matches(path)) read_only = 1;
        if (read_only && !paused && in_directory(path)) { errno = EROFS; return 1; }
    }
    return 0;
}

static int use_descriptor(int descriptor) {
    char path[PATH_MAX];
    return mode == 1 && of_descriptor(descriptor, path) && use(path);
}

static int change_descriptor(int descriptor) {
    char path[PATH_MAX];
    return mode && of_descriptor(descriptor, path) && change(path);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        mode_t permissions = va_arg(more, mode_t); \
        va_end(more); \
        if (mode && (flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) && change(path)) return -1; \
        return real(path, flags, permissions); \
    }
OPEN(open)
OPEN(open64)

int rename(const char *from, const char *to) {
    REAL(rename);
    if (mode && (change(from) || change(to))) return -1;
    return real(from, to);
}

int unlink(const char *path) {
    REAL(unlink);
    if (mode && change(path)) return -1;
    return real(path);
}

int link(const char *from, const char *to) {
    REAL(link);
    if (mode && change(to)) return -1;
    return real(from, to);
}

ssize_t read(int descriptor, void *buffer, size_t size) {
    REAL(read);
    return use_descriptor(descriptor) ? -1 : real(descriptor, buffer, size);
}

ssize_t pread(int descriptor, void *buffer, size_t size, off_t at) {
    REAL(pread);
    return use_descriptor(descriptor) ? -1 : real(descriptor, buffer, size, at);
}

ssize_t pread64(int descriptor, void *buffer, size_t size, off64_t at) {
    REAL(pread64);
    return use_descriptor(descriptor) ? -1 : real(descriptor, buffer, size, at);
}

void *mmap(void *address, size_t size, int protection, int flags, int descriptor, off_t at) {
    REAL(mmap);
    if (descriptor >= 0 && use_descriptor(descriptor)) return MAP_FAILED;
    return real(address, size, protection, flags, descriptor, at);
}

void *mmap64(void *address, size_t size, int protection, int flags, int descriptor, off64_t at) {
    REAL(mmap64);
    if (descriptor >= 0 && use_descriptor(descriptor)) return MAP_FAILED;
    return real(address, size, protection, flags, descriptor, at);
}

ssize_t write(int descriptor, const void *buffer, size_t size) {
    REAL(write);
    return change_descriptor(descriptor) ? -1 : real(descriptor, buffer, size);
}

ssize_t pwrite64(int descriptor, const void *buffer, size_t size, off64_t at) {
    REAL(pwrite64);
    return change_descriptor(descriptor) ? -1 : real(descriptor, buffer, size, at);
}

ssize_t pwrite(int descriptor, const void *buffer, size_t size, off_t at) {
    REAL(pwrite);
    return change_descriptor(descriptor) ? -1 : real(descriptor, buffer, size, at);
}

int fsync(int descriptor) {
    REAL(fsync);
    return use_descriptor(descriptor) ? -1 : real(descriptor);
}

int fdatasync(int descriptor) {
    REAL(fdatasync);
    return use_descriptor(descriptor) ? -1 : real(descriptor);
}

int ftruncate64(int descriptor, off64_t size) {
    REAL(ftruncate64);
    return change_descriptor(descriptor) ? -1 : real(descriptor, size);
}

int posix_fallocate64(int descriptor, off64_t at, off64_t size) {
    REAL(posix_fallocate64);
    return change_descriptor(descriptor) ? errno : real(descriptor, at, size);
}
