/* Threads of the library's calls, and memory of a step. The caller and its helpers claim pieces of
 * a task by an atomic counter.
 *
 * Beside another program a helper may lose its core for milliseconds. The caller waits for pieces
 * that a helper has claimed, never for one that has not begun; and once it has waited for long, it
 * does some calls by itself. So two threads beside a busy program lose little against one alone.
 * Who does a piece does not change its bits.
 *
 * A helper never works on the wrong task. ``run`` sets the task before ``unclaimed``, and ends when
 * all claimed pieces are done and reported. A helper that is late claims from the counter that is
 * there by then, and reads the task after its claim. Between two tasks the counter is 0 or less, so
 * that a claim is empty. */

#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include "numbers.h"

typedef void Task(void *argument, long piece);

enum { /* a look reads one of the counters below, once */
    AWAKE = 2000,    /* looks for work before a thread yields its core between two looks */
    STALLED = 2400,  /* looks after which the caller counts as held up by a helper */
    PATIENCE = 6000, /* looks before a helper sleeps */
    ALONE = 8,       /* calls that the caller then does by itself */
};
enum { SHARE = 1 << 13 }; /* cost of the pieces that are claimed at a time, at least */

static struct {
    _Alignas(64) atomic_long unclaimed; /* pieces of the task; 0 or less if there is none */
    _Alignas(64) atomic_long done;      /* pieces that helpers have done */
    _Alignas(64) atomic_long helpers;   /* that take part in this call */
    atomic_long share;                  /* pieces of a claim, at least */
    Task *task; /* this and the next two stay until all claimed pieces are done */
    void *argument;
    long pieces;
    long started;         /* helpers asked for so far; one that did not start is not tried again */
    long calls;           /* of the library, so far, on several threads */
    long alone;           /* calls that the caller is still to do by itself */
    pthread_mutex_t lock; /* of helpers that sleep until a call has begun */
    pthread_cond_t begun;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER};

/* Claim pieces and do them, until none is left. Returns how many were done here. A claim is half of
 * a thread's part of what is unclaimed: so claims are few at first, and small at last. */
static long work(void) {
    long done = 0, unclaimed;
    while ((unclaimed = pool.unclaimed) > 0) {
        long share = max(pool.share, unclaimed / (2 * (pool.helpers + 1)));
        long before = atomic_fetch_sub(&pool.unclaimed, share); /* others may have been faster */
        long first = pool.pieces - before, taken = max(0, min(share, before));
        for (long piece = first; piece < first + taken; piece++)
            pool.task(pool.argument, piece);
        done += taken;
    }
    return done;
}

/* Life of a helper: work while there is some, then sleep until the next call. Helpers are numbered
 * from 0; those from pool.helpers on take no part in this call. */
static void *help(void *number) {
    for (long seen = 0;;) {
        for (long looks = 0; looks < PATIENCE; looks++) {
            long done = (long)number < pool.helpers ? work() : 0;
            if (done) {
                atomic_fetch_add(&pool.done, done);
                looks = 0;
            } else if (looks > AWAKE) {
                sched_yield();
            }
        }
        pthread_mutex_lock(&pool.lock);
        while (pool.calls == seen)
            pthread_cond_wait(&pool.begun, &pool.lock);
        seen = pool.calls;
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

/* Wake or start helpers, for a call on so many threads. */
void use_threads(long threads) {
    pool.helpers = 0;
    if (threads == 1)
        return;
    if (pool.alone > 0) {
        pool.alone--;
        return;
    }
    pthread_mutex_lock(&pool.lock);
    pool.helpers = threads - 1;
    pool.calls++;
    pthread_cond_broadcast(&pool.begun);
    pthread_mutex_unlock(&pool.lock);
    for (pthread_t thread; pool.started < threads - 1; pool.started++)
        if (pthread_create(&thread, NULL, help, (void *)pool.started) == 0)
            pthread_detach(thread);
}

/* Do all pieces of a task on all threads. A piece costs as much as so many numbers to add, or eight
 * times as many bytes of weights to read. */
static void run(Task *task, void *argument, long pieces, long cost) {
    long share = SHARE / max(1, cost) + 1;
    if (pieces <= share || pool.helpers == 0) {
        for (long piece = 0; piece < pieces; piece++)
            task(argument, piece);
        return;
    }
    pool.task = task;
    pool.argument = argument;
    pool.pieces = pieces;
    pool.share = share;
    pool.done = 0;
    pool.unclaimed = pieces; /* helpers begin at once */
    long by_helpers = pieces - work();
    for (long looks = 0; pool.done < by_helpers; looks++) {
        if (looks > AWAKE)
            sched_yield();
        if (looks > STALLED)
            pool.alone = ALONE;
    }
}

typedef struct {
    void *place;
    size_t bytes;
} Memory;

/* Place of at least so many bytes, which are kept for the next step. */
static void *grow(Memory *memory, size_t bytes) {
    if (memory->bytes < bytes) {
        free(memory->place);
        memory->bytes = (bytes + 63) / 64 * 64;
        memory->place = aligned_alloc(64, memory->bytes);
        if (!memory->place)
            abort();
    }
    return memory->place;
}
