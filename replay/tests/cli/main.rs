//! The program as users meet it: help, exit statuses, damaged files, becoming another program.

mod answers;
mod damage;
mod files;
mod help;
mod map;
mod record;
mod summaries;
mod support;
