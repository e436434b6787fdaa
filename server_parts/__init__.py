"""The parts of server.py: the wire's models, the thread that steps the engine, the HTTP application, its page."""
