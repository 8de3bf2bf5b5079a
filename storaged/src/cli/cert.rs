//! `storaged cert`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use storaged_sdk::wire::NodeName;

use super::{CliError, print};
use crate::net::cert::{create_ca, issue, renew};

const DAY: Duration = Duration::from_secs(86_400);

#[derive(Debug, Subcommand)]
pub enum CertCommand {
    /// Make a certificate authority: DIR/ca.pem and DIR/ca.key
    #[command(
        after_help = "Next: storaged cert issue DIR NODE, for every node. Keep ca.key off the nodes."
    )]
    Ca {
        /// Directory to make it in
        directory: PathBuf,
        /// How long it is valid
        #[arg(long, default_value_t = 3650)]
        days: u32,
    },
    /// Make a node's certificate: DIR/NODE.pem and DIR/NODE.key, signed by the authority in DIR
    #[command(
        after_help = "Next: name ca.pem, NODE.pem and NODE.key in [tls] of the node's configuration."
    )]
    Issue {
        /// Directory of the authority
        directory: PathBuf,
        /// The node's name, as in its configuration
        node: NodeName,
        /// How long it is valid
        #[arg(long, default_value_t = 365)]
        days: u32,
    },
    /// Make a new certificate and key in place of a node's DIR/NODE.pem and DIR/NODE.key
    #[command(
        after_help = "Next: copy both files to the node and reload its daemon: systemctl reload storaged, or kill -HUP. Links and RAM stay."
    )]
    Renew {
        /// Directory of the authority
        directory: PathBuf,
        /// The node's name, as in its configuration
        node: NodeName,
        /// How long it is valid
        #[arg(long, default_value_t = 365)]
        days: u32,
    },
}

pub fn cert(command: CertCommand) -> Result<(), CliError> {
    let path = match command {
        CertCommand::Ca { directory, days } => create_ca(&directory, DAY * days)?,
        CertCommand::Issue {
            directory,
            node,
            days,
        } => issue(&directory, &node, DAY * days)?,
        CertCommand::Renew {
            directory,
            node,
            days,
        } => renew(&directory, &node, DAY * days)?,
    };
    print(&path.display().to_string());
    Ok(())
}
