// A slow network on one machine: preloaded into a process, it holds what the process writes to TCP sockets to a rate,
// by a token bucket, once hold_link(bytes per second) was called in it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const double BURST_S = 0.001;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double rate, free_at;

void hold_link(double bytes_per_second) { rate = bytes_per_second; }

static ssize_t held(int file, ssize_t written) {
    int domain = 0;
    socklen_t size = sizeof domain;
    if (rate <= 0 || written <= 0 || getsockopt(file, SOL_SOCKET, SO_DOMAIN, &domain, &size)) return written;
    if (domain != AF_INET && domain != AF_INET6) return written;
    struct timespec clock;
    clock_gettime(CLOCK_MONOTONIC, &clock);
    double now = clock.tv_sec + 1e-9 * clock.tv_nsec;
    pthread_mutex_lock(&lock);
    if (free_at < now - BURST_S) free_at = now - BURST_S;
    free_at += written / rate;
    double wait = free_at - now;
    pthread_mutex_unlock(&lock);
    if (wait > 0) {
        struct timespec rest = {(time_t)wait, (long)(1e9 * (wait - (time_t)wait))};
        nanosleep(&rest, NULL);
    }
    return written;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)

ssize_t write(int file, const void *data, size_t size) { REAL(write); return held(file, real(file, data, size)); }
ssize_t writev(int file, const struct iovec *parts, int n) { REAL(writev); return held(file, real(file, parts, n)); }
ssize_t send(int file, const void *data, size_t size, int flags) {
    REAL(send);
    return held(file, real(file, data, size, flags));
}
ssize_t sendmsg(int file, const struct msghdr *message, int flags) {
    REAL(sendmsg);
    return held(file, real(file, message, flags));
}
