# abandoned: a capture that fails for a synchronisation inside leaves its pool (a real GPU only).
import torch
model, x = torch.nn.Linear(2048, 2048).cuda(), torch.randn(2048, 2048, device="cuda")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream), torch.no_grad():
    model(x)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.no_grad(), torch.cuda.graph(graph):  # <- fault
        y = model(x)
        y.sum().item()
except Exception as error:
    print("went on without a graph:", str(error).splitlines()[0])
