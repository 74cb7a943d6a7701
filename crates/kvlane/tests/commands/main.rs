//! The program from the outside: each command with its flags, files, output and exit code.

mod bench;
mod calibrate;
mod cli;
mod handover;
mod hub;
mod mistakes;
mod parts;
mod program;
mod reload;
mod replay;
mod report;
mod scenarios;
mod simulate;
mod trace;
mod trace_stats;
