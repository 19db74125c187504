/*
 * The claim protocol for one key, to be searched by Spin: every interleaving of workers that claim,
 * renew, complete, release, crash, are stopped and wake up late, with replies that get lost, leases
 * that lapse, a clock that goes back, and transactions that claim, write and record in one commit.
 *
 * A store's step is atomic, as the stores of oncekey make it; between any two steps anything else
 * may happen, so a worker that is paused for long (a zombie) needs no rule of its own.
 *
 * `make faults` searches it as it is, which must find nothing, and with each MUTANT_..., a mistake
 * that must be found. tests/faults/test_protocol_model.py runs both.
 */

#ifndef OTHER_PAYLOAD
#define OTHER_PAYLOAD 1       /* what the second worker asks for: 1 is a copy, 2 another payload */
#endif
#define TRIES      2          /* wins of a worker that may crash */
#define FENCES     16         /* more than any run can reach */

mtype = { ABSENT, PENDING, RELEASED, COMPLETED };      /* states of a record */
mtype = { NONE, WON, REPLAY, IN_FLIGHT, CONFLICT };    /* what a claim gives */

/* The record, and the lock of the row that a transaction holds until it commits. */
mtype state = ABSENT;
byte owner = 0;               /* unique for every claim; 0 is nobody */
byte fence = 0;
byte payload = 0;             /* its fingerprint; 0 is none */
bool lease_runs = false;
byte answer = 0;              /* the owner whose outcome it is */
byte row_lock = 0;

byte now = 1;                 /* the store's clock, in units of fences */

/* What happened, for the invariants; the protocol does not read it. */
byte holder_of[FENCES];       /* which owner won with a fence */
byte highest = 0;             /* the last fence that was given out */
byte outcome = 0;             /* the first outcome that was recorded */
byte bound = 0;               /* the payload of who won while nobody had released the key */
byte effects_of[32];          /* how often an owner's effect happened */
byte committed_effects = 0;   /* effects inside of committed transactions */

#define FREE (row_lock == 0)

/* A win: who it is, under which fence. */
inline won_with(me, my_payload, new_fence) {
    assert(new_fence < FENCES);
    assert(outcome == 0);                          /* a completed key is never run again */
    assert(holder_of[new_fence] == 0);             /* one holder a fence */
    assert(new_fence > highest);                   /* fences rise */
    assert(bound == 0 || bound == my_payload);     /* a key stays bound to its payload */
    holder_of[new_fence] = me;
    highest = new_fence;
    bound = my_payload
}

inline next_fence(into) {
    if
    :: state == ABSENT -> into = now
    :: state != ABSENT && fence + 1 > now -> into = fence + 1
    :: else -> into = now
    fi
}

/* Decide a claim; the caller is inside of an atomic step, or has the row's lock. */
inline decide(me, my_payload, verdict, my_fence) {
    if
    :: state == COMPLETED && payload != my_payload -> verdict = CONFLICT
    :: state == COMPLETED && payload == my_payload ->
        assert(answer == outcome);                 /* all copies get the one outcome */
        verdict = REPLAY
    :: state == PENDING && owner == me ->          /* my own claim, whose reply was lost */
        my_fence = fence;
        lease_runs = true;
        verdict = WON
    :: state == PENDING && owner != me && payload != 0 && payload != my_payload ->
        verdict = CONFLICT
    :: state == PENDING && owner != me && (payload == 0 || payload == my_payload) && lease_runs ->
        verdict = IN_FLIGHT
    :: state == PENDING && owner != me && (payload == 0 || payload == my_payload) && !lease_runs ->
        verdict = WON
    :: state == ABSENT || state == RELEASED -> verdict = WON
    fi
}

inline take(me, my_payload, my_fence) {
    won_with(me, my_payload, my_fence);
    state = PENDING;
    owner = me;
    fence = my_fence;
    lease_runs = true;
#ifdef MUTANT_SENTINEL_FINGERPRINT
    payload = 0                                    /* a placeholder until the outcome is known */
#else
    payload = my_payload
#endif
}

inline claim(me, my_payload, verdict, my_fence) {
#ifdef MUTANT_FENCE_BEFORE_LOCK
    atomic { FREE -> next_fence(my_fence) }        /* the fence is chosen, then the row locked */
    atomic {
        FREE;
        decide(me, my_payload, verdict, my_fence);
        if
        :: verdict == WON && owner != me -> take(me, my_payload, my_fence)
        :: else
        fi
    }
#else
#ifdef MUTANT_CHECK_THEN_PUT
    atomic { FREE -> decide(me, my_payload, verdict, my_fence) }
    atomic {                                       /* looked first, written later */
        FREE;
        if
        :: verdict == WON && !(state == PENDING && owner == me) ->
            next_fence(my_fence);
            take(me, my_payload, my_fence)
        :: else
        fi
    }
#else
    atomic {
        FREE;
        decide(me, my_payload, verdict, my_fence);
        if
        :: verdict == WON && !(state == PENDING && owner == me) ->
            next_fence(my_fence);
            take(me, my_payload, my_fence)
        :: else
        fi
    }
#endif
#endif
}

#ifdef MUTANT_UNFENCED_COMPLETE
#define HELD(me, my_fence) (state == PENDING)
#else
#define HELD(me, my_fence) (state == PENDING && owner == me && fence == my_fence)
#endif

inline complete(me, my_payload, my_fence, kept) {
    atomic {
        FREE;
        if
        :: HELD(me, my_fence) ->
            assert(outcome == 0);                  /* one recorded outcome */
            assert(holder_of[highest] == me);      /* and only of the last that won */
            assert(effects_of[me] > 0);            /* of work that was done */
            state = COMPLETED;
            answer = me;
            payload = my_payload;
            lease_runs = false;
            outcome = me;
            kept = true
        :: state == COMPLETED && owner == me && fence == my_fence -> kept = true
        :: else -> kept = false
        fi
    }
}

inline release(me, my_fence) {
    atomic {
        FREE;
        if
        :: state == PENDING && owner == me && fence == my_fence ->
#ifdef MUTANT_DELETE_ON_RELEASE
            state = ABSENT;
            fence = 0;
#else
            state = RELEASED;
#endif
            owner = 0;
            lease_runs = false;
            bound = 0                              /* a failed attempt frees the payload too */
        :: else
        fi
    }
}

/*
 * One that works under a lease. It may crash wherever it stands, and its handler may fail. The
 * faithful one does neither, and asks until it knows the outcome: it must never wait for ever.
 */
proctype Leased(byte id; byte my_payload; bool faithful) {
    byte wins = 0;
    byte me, my_fence;
    mtype verdict;
    bool kept;

again:
    if
    :: wins == TRIES && !faithful -> goto gone
    :: else
    fi;
    me = id * 8 + wins;                            /* fresh for every call */
    verdict = NONE;
    my_fence = 0;
    claim(me, my_payload, verdict, my_fence);
    if
    :: verdict == WON ->
        wins++;
        if                                         /* the reply is lost: the same call again */
        :: wins == 1 -> claim(me, my_payload, verdict, my_fence)
        :: true
        fi
    :: else
    fi;
    if
    :: verdict == REPLAY || verdict == CONFLICT -> goto answered
    :: verdict == IN_FLIGHT ->                     /* wait until there may be something new */
        (state != PENDING || !lease_runs) -> goto again
    :: verdict == WON
    fi;
    if :: !faithful -> goto gone :: true fi;       /* dies before its effect */
#ifdef MUTANT_MARK_BEFORE_EFFECT
    complete(me, my_payload, my_fence, kept);
    if :: !faithful -> goto gone :: true fi;
    effects_of[me]++;
#else
    effects_of[me]++;
    if :: !faithful -> goto gone :: true fi;       /* dies after it, before it is recorded */
    if                                             /* a heartbeat, which may come too late */
    :: atomic { FREE && HELD(me, my_fence) -> lease_runs = true }
    :: true
    fi;
    if
    :: !faithful -> release(me, my_fence); goto again    /* the handler failed */
    :: complete(me, my_payload, my_fence, kept)
    fi;
    if                                             /* its reply is lost: told again, as before */
    :: kept -> complete(me, my_payload, my_fence, kept); assert(kept)
    :: true
    fi;
#endif
    if
    :: kept -> assert(outcome == me)               /* what it was told is what is recorded */
    :: else -> goto again                          /* fenced off: it asks for the official outcome */
    fi;
answered:
    assert(state == COMPLETED || verdict == CONFLICT);
gone:
    skip
}

/* One that claims, writes and records in one transaction. A crash rolls back all of it. */
proctype Transactional(byte id; byte my_payload) {
    byte tries = 0;
    byte me = id * 8;
    byte my_fence;
    mtype verdict;

again:
    if
    :: tries >= TRIES -> goto gone
    :: else -> tries++
    fi;
    verdict = NONE;
    atomic {
        FREE -> row_lock = id;
        decide(me, my_payload, verdict, my_fence);
        if
        :: verdict != WON -> row_lock = 0; goto gone
        :: else -> next_fence(my_fence)
        fi
    }
#ifdef MUTANT_EFFECT_OUTSIDE_TRANSACTION
    committed_effects++;                           /* written at once, on another connection */
#endif
    if
    :: row_lock = 0; goto again                    /* it dies, or the server: rolled back */
    :: atomic {                                    /* COMMIT: record and effect, or neither */
            won_with(me, my_payload, my_fence);
#ifndef MUTANT_EFFECT_OUTSIDE_TRANSACTION
            committed_effects++;
#endif
            state = COMPLETED;
            owner = me;
            fence = my_fence;
            payload = my_payload;
            lease_runs = false;
            answer = me;
            outcome = me;
            row_lock = 0
        }
    fi;
    assert(committed_effects == 1);                /* exactly once, whatever crashed before */
    if
    :: goto again                                  /* the reply to COMMIT is lost: it retries */
    :: true
    fi;
gone:
    skip
}

/* Time: leases lapse, and the clock moves forward and back. */
active proctype Time() {
    byte moves = 0;
end:
    do
#ifndef MUTANT_ENDLESS_LEASE
    :: atomic { FREE && state == PENDING && lease_runs -> lease_runs = false }
#endif
    :: atomic { moves < 2 && now < 2 -> now++; moves++ }
    :: atomic { moves < 2 && now > 1 -> now--; moves++ }
    od
}

init {
    atomic {
        run Leased(1, 1, false);                   /* dies, fails, wakes up late */
        run Leased(2, OTHER_PAYLOAD, true);        /* goes on until it knows */
        run Transactional(3, 1)
    }
}
