# SHOWS: JSON in and out, sorted, and a parse error caught
# EXPECT: ok
# STDOUT: {"avg": 8.5, "names": ["Ada", "Grace"]}
# STDOUT: not JSON: Expecting value: line 1 column 7 (char 6)
import json

people = json.loads('[{"name": "Grace", "score": 9}, {"name": "Ada", "score": 8}]')
summary = {
    "names": sorted(p["name"] for p in people),
    "avg": sum(p["score"] for p in people) / len(people),
}
print(json.dumps(summary, sort_keys=True))
try:
    json.loads('{"a": }')
except json.JSONDecodeError as e:
    print("not JSON:", e)
