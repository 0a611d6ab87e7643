"""Native code for the CPU: built from source with the system's compiler at first use, then cached."""
