"""Models are built one at a time in a process: whoever builds one changes torch for every thread meanwhile.

transformers sets the default dtype and patches torch's initialisers; an adapter is drawn from the global generator. Of
two models at once, one lost its tied output head, and one got the tables of its positions in half precision.
"""

import threading

one_model_at_a_time = threading.Lock()
