"""Processes that run other people's code and can be killed; rewards and environments use them.

    driver                            keeper: any Python >= 3.10 with its standard library
      Workers, one thread <─ socket ─>  forks, kills and reaps; reads nothing that a model wrote
           │                              │ fork
           └─ socket and pipe of each ─>  worker: is confined, calls load(hello), then serve(channel, loaded)

The driver's half is `workers.Workers`. To use it, subclass it and override these callbacks:

    class Pool(Workers):
        def __init__(self): super().__init__("reward", "rlhf.rewards.worker", {...}, code=["mine.py:f"], size=8, ...)
        def on_ready(self, worker, about): ...    # it has loaded the code; `about` comes from `load`
        def on_message(self, worker, message): ...    # any exception ends this worker alone
        def on_gone(self, worker, why, detail): ...   # TIMEOUT, DIED or LOST; worker.work holds the unanswered work
        def on_turn(self): ...    # all messages have been read: hand out work
        def on_end(self, reason): ...    # closed ("") or broken: fail the work that waits

They run in the one thread of `Workers`; other threads use `call_soon(function, *arguments)`. They may use:

    self.free()                  workers that are ready and not being killed
    self.send(worker, message)   a mapping; `Channel.receive` returns it in the worker
    worker.watch.start(pid), .stop()   in between, CPU seconds, wall-clock seconds and processes are limited
    self.kill(worker, why, detail)     has the process that forked it kill it; calls on_gone at once
    self.size                    the wanted number of workers; missing ones are forked in milliseconds

The workers' half is a module of the user (`work`), imported once by the keeper, with two functions:

    load(hello) -> (loaded, about)   imports other people's code; ValueError if it cannot. Then the start fails; later,
                                     a few more workers try before the driver gives up
    serve(channel, loaded)           answers messages until the driver hangs up, then returns

Each worker has a folder for temporary files, removed with it, and a pipe as standard output (`output.printing_as`).
With `template=True` one process is confined and calls `load`; all workers are forked from it and only call `serve`.
They start in milliseconds and share its memory, but without its threads: code that starts threads when it is imported,
or holds an event loop or a GPU, needs `template=False`. They are forked with the restrictions of the template, cannot
signal each other or write to each other's folders, and cannot read /proc/self.

This package imports the standard library alone: `python` may name the interpreter of another virtual environment.
"""
