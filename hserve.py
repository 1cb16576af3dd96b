import sys, types; m=types.ModuleType("tests"); m.__path__=["/work/wt/serve/tests"]; sys.modules["tests"]=m
import sys, time
from tests.server.conftest import serving
from invariant_rag import *
from invariant_rag.server import *
from invariant_rag.server.serving import configure_logging
from invariant_rag.orderings import MonoT5
from invariant_rag.models.embedded import EMBEDDED
configure_logging()
lm=InvariantModel.from_pretrained()
with serving(InProcess(lm,"small",caches={"":KeyValueCache()}), Settings(max_new_tokens=32,timeout=20,body_timeout=3,max_body_bytes=1<<20), MonoT5(EMBEDDED["monot5"])) as url:
    print(url, flush=True); time.sleep(float(sys.argv[1]))
