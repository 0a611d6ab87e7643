"""What a kernel costs on a chip that is not here: compile ahead of time, read the compiler's own schedule, count cycles."""
