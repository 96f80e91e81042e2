"""Processes that run other people's code and can be killed; rewards and environments use them.

    driver                            keeper: any Python >= 3.10 with its standard library
      Workers, one thread <─ socket ─>  forks, kills and reaps; reads nothing that a model wrote
           │                              │ fork
           │                            warden: kills all that its worker has started, when this or the keeper ends
           │                              │ fork
           └─ socket and pipe of each ─>  worker: is confined, calls load(hello), then serve(channel, loaded)

The driver's half is `workers.Workers`. To use it, subclass it and override its callbacks, which run in its one thread:
`on_ready`, `on_message`, `on_gone`, `on_turn`, `on_end`. They may call `free`, `send` and `kill`, set `size` (missing
workers are forked in milliseconds), and limit the CPU seconds, wall-clock seconds and processes of a piece of work from
`worker.watch.start(pid)` to `.stop()`. Other threads use `call_soon(function, *arguments)`.

The workers' half is a module of the user (`work`), imported once by the keeper, with two functions:

    load(hello) -> (loaded, about)   imports other people's code; ValueError if it cannot. Then the start fails; later,
                                     further workers try for `reload_s` before the driver gives up
    serve(channel, loaded)           answers messages until the driver hangs up, then returns

Each worker has a folder for temporary files, removed with it, and a pipe as standard output (`output.printing_as`).
With `template=True` one process is confined and calls `load`; all workers are forked from it and only call `serve`.
They start in milliseconds and share its memory, but without its threads: code that starts threads when it is imported,
or holds an event loop or a GPU, needs `template=False`. They are forked with the restrictions of the template, cannot
signal each other or write to each other's folders, and cannot read /proc/self.

This package imports the standard library alone: `python` may name the interpreter of another virtual environment.
"""
