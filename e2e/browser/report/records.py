"""Records of made-up runs: conversations on a few engines, sent in turn or where their prefix is.

python3 records.py FILE COUNT ENGINES turn|prefix writes them as `kvlane replay --records` does.
"""
import json
import random
import sys


def write(path, count, engines, how):
    rng = random.Random(7)
    free, held = [0.0] * engines, [dict() for _ in range(engines)]
    conversations, now, slots = [], 0.0, 8
    with open(path, "w", encoding="utf-8") as out:
        for number in range(count):
            now += rng.expovariate(2.5 * engines) * (0.6 if 0.4 < number / count < 0.6 else 1.1)
            if not conversations or rng.random() < 0.12:
                conversations.append([len(conversations), rng.randint(500, 4000)])
            talk = conversations[-1 - min(int(rng.expovariate(0.03)), len(conversations) - 1)]
            talk[1] = min(talk[1] + rng.randint(50, 600), 30000)
            session, prompt = talk
            if how == "turn":
                engine = number % engines
            else:
                engine = min(range(engines), key=lambda e: max(free[e] - now, 0) + (prompt - held[e].get(session, 0)) / 25000)
            cached = min(held[engine].get(session, 0), prompt - 1) // 16 * 16
            known = max(cells.get(session, 0) for cells in held)
            held[engine][session] = prompt
            if len(held[engine]) > 60:
                held[engine].pop(next(iter(held[engine])))
            begin = max(free[engine], now)
            first = begin + (prompt - cached) / 25000 + 0.02 + rng.random() * 0.01
            free[engine] = first
            tokens = rng.randint(20, 300)
            end = first + tokens * (0.012 + 0.004 * rng.random())
            failed = rng.random() < 0.004
            record = {
                "id": number, "scheduled_s": round(now, 6), "sent_s": round(now + 0.0003, 6), "end_s": round(end, 6),
                "prompt_tokens": prompt, "output_tokens": 0 if failed else tokens, "status": 503 if failed else 200,
                "endpoint": f"http://10.0.0.{engine + 1}:8000", "session": session,
            }
            if failed:
                record["error"] = "status"
            else:
                record |= {
                    "first_token_s": round(first, 6), "cached_tokens": cached, "reusable_tokens": min(known, prompt) // 16 * 16,
                    "stages_s": {
                        "read": 4e-05, "parse": 3e-05, "tokenize": 0.0008, "place": 1.2e-05,
                        "queue": round(max(0.0, begin - now - 0.4), 6), "send": 9e-05, "engine": round(first - begin, 6),
                    },
                    "gaps": {"p50_s": 0.012, "p99_s": round(0.016 + rng.random() * 0.02, 6), "max_s": 0.05},
                }
            out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
