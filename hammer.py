import sys, types; m=types.ModuleType("tests"); m.__path__=["/work/wt/serve/tests"]; sys.modules["tests"]=m
import sys, random, time, json, collections, threading
from concurrent.futures import ThreadPoolExecutor
import httpx
from tests.server.hostile import hostile_request
url=sys.argv[1]; first=int(sys.argv[2]); count=int(sys.argv[3])
stats=collections.Counter(); slow=[]; bad=[]
def one(seed):
    path, content = hostile_request(random.Random(seed))
    t=time.time()
    try:
        r=httpx.post(url+path, content=content, headers={"content-type":"application/json"}, timeout=60)
    except Exception as e:
        bad.append((seed,path,repr(e))); stats["exc"]+=1; return
    d=time.time()-t
    stats[(r.status_code)]+=1
    if d>5: slow.append((round(d,1),seed,path,r.status_code))
    if r.status_code>=500 or (r.status_code==200 and b'"server_error"' in r.content): bad.append((seed,path,r.status_code,r.text[:300]))
with ThreadPoolExecutor(6) as p: list(p.map(one, range(first,first+count)))
print(stats); print("slow",sorted(slow)[-10:]); print("bad",len(bad)); [print(b) for b in bad[:15]]
