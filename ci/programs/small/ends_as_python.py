"""A program whose last work is done by a thread, an executor and functions registered with atexit."""

# prints: thread ended
# prints: executor ended
# prints: bye

import atexit
import concurrent.futures
import threading
import time

import torch

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def say(words):
    time.sleep(0.2)
    print(words)


@atexit.register
def flush():
    with open("log.txt", "w") as log:
        log.write("flushed")
    print("bye")


for _ in range(8):
    model(torch.randn(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
threading.Thread(target=say, args=("thread ended",)).start()
concurrent.futures.ThreadPoolExecutor(1).submit(say, "executor ended")
